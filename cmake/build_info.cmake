# What `dtcomm doctor` prints about the build; no dates and no paths, so that equal sources give equal binaries.
string(TOUPPER "CMAKE_CXX_FLAGS_${CMAKE_BUILD_TYPE}" type_flags)
list(JOIN HOST_FLAGS " " host_flags)
string(STRIP "${CMAKE_CXX_FLAGS} ${${type_flags}} ${host_flags}" DTCOMM_FLAGS)
configure_file(cmake/build_info.h.in "${CMAKE_BINARY_DIR}/generated/build_info.h" @ONLY)
target_include_directories(_C PRIVATE "${CMAKE_BINARY_DIR}/generated")
