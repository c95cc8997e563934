// The families as kernels.cu sees them: what each is made of, and where its kernels are queued. One file of
// families/ each, so that they compile side by side.
#pragma once

#include "cuda/families/cast.cuh"
#include "cuda/families/float8.cuh"
#include "cuda/families/integer.cuh"
#include "cuda/families/mx.cuh"
#include "cuda/families/sign.cuh"
#include "cuda/params.cuh"
#include "cuda/sparse.cuh"

namespace dtcomm::cuda {

// Each returns nullptr, or why nothing was queued.
const char* launch(const Call& call, const Cast<DType::f32>& family, void* stream);
const char* launch(const Call& call, const Cast<DType::f16>& family, void* stream);
const char* launch(const Call& call, const Cast<DType::bf16>& family, void* stream);
const char* launch(const Call& call, const Integer<8, 4, true>& family, void* stream);
const char* launch(const Call& call, const Integer<8, 16, true>& family, void* stream);
const char* launch(const Call& call, const Integer<4, 4, true>& family, void* stream);
const char* launch(const Call& call, const Integer<4, 16, true>& family, void* stream);
const char* launch(const Call& call, const AnyInteger& family, void* stream);
const char* launch(const Call& call, const Float8<E4m3, 4, true>& family, void* stream);
const char* launch(const Call& call, const Float8<E4m3, 16, true>& family, void* stream);
const char* launch(const Call& call, const Float8<E4m3, 0, false>& family, void* stream);
const char* launch(const Call& call, const Float8<E5m2, 0, false>& family, void* stream);
const char* launch(const Call& call, const Mx<E4m3>& family, void* stream);
const char* launch(const Call& call, const Mx<E5m2>& family, void* stream);
const char* launch(const Call& call, const Mx<E2m1>& family, void* stream);
const char* launch(const Call& call, const Sign& family, void* stream);
const char* launch(const Call& call, const Sparse& family, void* stream);

}  // namespace dtcomm::cuda
