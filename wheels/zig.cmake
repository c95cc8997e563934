# Toolchain of the wheels: the clang of the package ziglang, which brings the headers and stubs of old C libraries and of
# other processors, and links its C++ library statically.
#
# wheels/build.py sets in the environment: DTCOMM_ZIG (a folder with c++, ar and ranlib), DTCOMM_TARGET (x86_64 or aarch64).
if(NOT CMAKE_HOST_SYSTEM_PROCESSOR STREQUAL "$ENV{DTCOMM_TARGET}")
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_SYSTEM_PROCESSOR "$ENV{DTCOMM_TARGET}")
endif()
set(CMAKE_CXX_COMPILER "$ENV{DTCOMM_ZIG}/c++")
set(CMAKE_AR "$ENV{DTCOMM_ZIG}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "$ENV{DTCOMM_ZIG}/ranlib" CACHE FILEPATH "")
# The host's strip may not know the target, so the linker strips.
set(CMAKE_STRIP "" CACHE FILEPATH "")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-Wl,-s")
# Link-time optimization would compile the C++ library once more, and the kernels gain nothing from it.
set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF)
