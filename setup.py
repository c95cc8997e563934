"""Builds the native modules with CMake and Ninja; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """One CMake project makes every extension, so it is configured and built once."""

    def run(self) -> None:
        target = Path(self.get_ext_fullpath(self.extensions[0].name)).resolve().parent
        target.mkdir(parents=True, exist_ok=True)
        build = Path(os.environ.get("DTCOMM_BUILD_DIR", ROOT / "build" / "release"))
        build.mkdir(parents=True, exist_ok=True)
        import pybind11

        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('DTCOMM_BUILD_TYPE', 'Release')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DDTCOMM_OUTPUT_DIR={target}",
            f"-DDTCOMM_CUDA={os.environ.get('DTCOMM_CUDA', 'AUTO')}",
        ]
        env = dict(os.environ)
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
        subprocess.run(configure, check=True, env=env)
        subprocess.run(["cmake", "--build", str(build)], check=True, env=env)


setup(ext_modules=[Extension("dtcomm._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
