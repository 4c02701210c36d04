// Stands in for the CUDA headers, so that a kernel's arithmetic runs on the host, one thread after the other.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline

struct Dim { unsigned x; };
extern Dim blockIdx, blockDim, threadIdx, gridDim;

struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

typedef _Float16 __half;
struct __half2 { __half x, y; };
inline __half __ushort_as_half(unsigned short bits) { __half h; memcpy(&h, &bits, 2); return h; }
inline float __half2float(__half h) { return (float)h; }
inline __half2 __floats2half2_rn(float x, float y) { return {(__half)x, (__half)y}; }
inline float __uint_as_float(unsigned bits) { float f; memcpy(&f, &bits, 4); return f; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
