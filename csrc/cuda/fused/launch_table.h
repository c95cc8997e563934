// Where the fused kernels of each family are queued: one file of codecs/ each, so that they compile side by side.
#pragma once

#include "cuda/families.h"
#include "cuda/fused/program_step.cuh"

namespace dtcomm::cuda {

// Each returns nullptr, or in CUDA's words why nothing was queued.
const char* queue(const Fused& fused, const Cast<DType::f32>& family, void* stream);
const char* queue(const Fused& fused, const Cast<DType::f16>& family, void* stream);
const char* queue(const Fused& fused, const Cast<DType::bf16>& family, void* stream);
const char* queue(const Fused& fused, const Integer<8, 4, true>& family, void* stream);
const char* queue(const Fused& fused, const Integer<8, 16, true>& family, void* stream);
const char* queue(const Fused& fused, const Integer<4, 4, true>& family, void* stream);
const char* queue(const Fused& fused, const Integer<4, 16, true>& family, void* stream);
const char* queue(const Fused& fused, const Float8<E4m3, 4, true>& family, void* stream);
const char* queue(const Fused& fused, const Float8<E4m3, 16, true>& family, void* stream);

const char* queue(const Step& step, const Cast<DType::f32>& family, void* stream);
const char* queue(const Step& step, const Cast<DType::f16>& family, void* stream);
const char* queue(const Step& step, const Cast<DType::bf16>& family, void* stream);
const char* queue(const Step& step, const Integer<8, 4, true>& family, void* stream);
const char* queue(const Step& step, const Integer<8, 16, true>& family, void* stream);
const char* queue(const Step& step, const Integer<4, 4, true>& family, void* stream);
const char* queue(const Step& step, const Integer<4, 16, true>& family, void* stream);
const char* queue(const Step& step, const Float8<E4m3, 4, true>& family, void* stream);
const char* queue(const Step& step, const Float8<E4m3, 16, true>& family, void* stream);

}  // namespace dtcomm::cuda
