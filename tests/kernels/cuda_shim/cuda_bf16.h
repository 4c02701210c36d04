#pragma once
#include "cuda_fp16.h"

struct __nv_bfloat16 { unsigned short bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __nv_bfloat16 bf16_rn(float f) {
  unsigned u; memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return {(unsigned short)0x7fff};
  return {(unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {bf16_rn(x), bf16_rn(y)}; }
