"""The native core, as csrc/python binds it: one section per binding file."""

# csrc/python/build_info.cpp
def build_info() -> dict[str, str]: ...
