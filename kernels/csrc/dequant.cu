// Expands ggml blocks to 16-bit or 32-bit floats: one thread writes eight neighbouring values.
//
// Layouts are those of the block structs in ggml-common.h; the reference is kernels/dequant.py, compared bit
// for bit in fp32. A block's bytes have no alignment of their own (34 bytes for Q8_0), so fields are read as
// bytes; neighbouring threads read neighbouring bytes, and every byte comes from device memory once.
//
// Input: rows of blocks, num_batches of them, batch_stride bytes apart, so that one matrix of many expert
// blobs is expanded by one launch. Output: dense, batch after batch.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ float half_at(const u8* p) {
  return __half2float(__ushort_as_half((unsigned short)(p[0] | (p[1] << 8))));
}

__device__ __forceinline__ u32 word_at(const u8* p) {
  return p[0] | (p[1] << 8) | (p[2] << 16) | ((u32)p[3] << 24);
}

// A format: values per block, bytes per block, and the eight values from 8 * part on.
struct F32 {
  static constexpr int kValues = 8, kBytes = 32;
  static __device__ void expand(const u8* b, int, float* y) {
    for (int i = 0; i < 8; ++i) y[i] = __uint_as_float(word_at(b + 4 * i));
  }
};

struct F16 {
  static constexpr int kValues = 8, kBytes = 16;
  static __device__ void expand(const u8* b, int, float* y) {
    for (int i = 0; i < 8; ++i) y[i] = half_at(b + 2 * i);
  }
};

struct BF16 {
  static constexpr int kValues = 8, kBytes = 16;
  static __device__ void expand(const u8* b, int, float* y) {
    for (int i = 0; i < 8; ++i) y[i] = __uint_as_float((u32)(b[2 * i] | (b[2 * i + 1] << 8)) << 16);
  }
};

struct Q8_0 {
  static constexpr int kValues = 32, kBytes = 34;
  static __device__ void expand(const u8* b, int part, float* y) {
    const float d = half_at(b);
    for (int i = 0; i < 8; ++i) y[i] = d * (float)(i8)b[2 + 8 * part + i];
  }
};

// Legacy 4- and 5-bit types: values 0..15 are low nibbles, 16..31 high nibbles of the same 16 bytes.
__device__ __forceinline__ int nibble(const u8* qs, int part, int i) {
  const u8 byte = qs[8 * (part & 1) + i];
  return part < 2 ? byte & 15 : byte >> 4;
}

struct Q4_0 {
  static constexpr int kValues = 32, kBytes = 18;
  static __device__ void expand(const u8* b, int part, float* y) {
    const float d = half_at(b);
    for (int i = 0; i < 8; ++i) y[i] = d * (float)(nibble(b + 2, part, i) - 8);
  }
};

struct Q4_1 {
  static constexpr int kValues = 32, kBytes = 20;
  static __device__ void expand(const u8* b, int part, float* y) {
    const float d = half_at(b), m = half_at(b + 2);
    for (int i = 0; i < 8; ++i) y[i] = __fadd_rn(d * (float)nibble(b + 4, part, i), m);
  }
};

struct Q5_0 {
  static constexpr int kValues = 32, kBytes = 22;
  static __device__ void expand(const u8* b, int part, float* y) {
    const float d = half_at(b);
    const u32 high = word_at(b + 2) >> (8 * part);
    for (int i = 0; i < 8; ++i) y[i] = d * (float)((int)(nibble(b + 6, part, i) | (((high >> i) & 1) << 4)) - 16);
  }
};

struct Q5_1 {
  static constexpr int kValues = 32, kBytes = 24;
  static __device__ void expand(const u8* b, int part, float* y) {
    const float d = half_at(b), m = half_at(b + 2);
    const u32 high = word_at(b + 4) >> (8 * part);
    for (int i = 0; i < 8; ++i)
      y[i] = __fadd_rn(d * (float)(nibble(b + 8, part, i) | (((high >> i) & 1) << 4)), m);
  }
};

__device__ const i8 kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct IQ4_NL {
  static constexpr int kValues = 32, kBytes = 18;
  static __device__ void expand(const u8* b, int part, float* y) {
    const float d = half_at(b);
    for (int i = 0; i < 8; ++i) y[i] = d * (float)kIq4Values[nibble(b + 2, part, i)];
  }
};

struct IQ4_XS {
  static constexpr int kValues = 256, kBytes = 136;
  static __device__ void expand(const u8* b, int part, float* y) {
    const int sub = part >> 2;  // of 32 values
    const u32 scales_high = b[2] | (b[3] << 8);
    const int low = (b[4 + sub / 2] >> (4 * (sub & 1))) & 15;
    const int scale = (low | (((scales_high >> (2 * sub)) & 3) << 4)) - 32;
    const float d = half_at(b) * (float)scale;
    for (int i = 0; i < 8; ++i) y[i] = d * (float)kIq4Values[nibble(b + 8 + 16 * sub, part & 3, i)];
  }
};

struct Q2_0 {
  static constexpr int kValues = 64, kBytes = 18;
  static __device__ void expand(const u8* b, int part, float* y) {
    const float d = half_at(b);
    for (int i = 0; i < 8; ++i) {
      const int k = 8 * part + i;
      y[i] = d * (float)(((b[2 + k / 4] >> (2 * (k & 3))) & 3) - 1);
    }
  }
};

// Q4_K and Q5_K: eight 6-bit scales and minima in 12 bytes.
__device__ __forceinline__ void k_scale(const u8* s, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = s[j] & 63;
    *minimum = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    *minimum = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}

struct Q4_K {
  static constexpr int kValues = 256, kBytes = 144;
  static __device__ void expand(const u8* b, int part, float* y) {
    const int sub = part >> 2;
    int scale, minimum;
    k_scale(b + 4, sub, &scale, &minimum);
    const float d = half_at(b) * (float)scale, m = half_at(b + 2) * (float)minimum;
    const u8* q = b + 16 + 32 * (sub >> 1) + 8 * (part & 3);
    for (int i = 0; i < 8; ++i) y[i] = __fsub_rn(d * (float)((sub & 1) ? q[i] >> 4 : q[i] & 15), m);
  }
};

struct Q5_K {
  static constexpr int kValues = 256, kBytes = 176;
  static __device__ void expand(const u8* b, int part, float* y) {
    const int sub = part >> 2;
    int scale, minimum;
    k_scale(b + 4, sub, &scale, &minimum);
    const float d = half_at(b) * (float)scale, m = half_at(b + 2) * (float)minimum;
    const u8* high = b + 16 + 8 * (part & 3);
    const u8* q = b + 48 + 32 * (sub >> 1) + 8 * (part & 3);
    for (int i = 0; i < 8; ++i) {
      const int low = (sub & 1) ? q[i] >> 4 : q[i] & 15;
      y[i] = __fsub_rn(d * (float)(low | (((high[i] >> sub) & 1) << 4)), m);
    }
  }
};

struct Q6_K {
  static constexpr int kValues = 256, kBytes = 210;
  static __device__ void expand(const u8* b, int part, float* y) {
    const int half = part >> 4, quarter = (part >> 2) & 3, at = 8 * (part & 3);  // 128 values, 32 of them
    const u8* low = b + 64 * half + 32 * (quarter & 1) + at;
    const u8* high = b + 128 + 32 * half + at;
    const int scale = (i8)b[192 + 8 * half + 2 * quarter + (at >> 4)];
    const float d = half_at(b + 208) * (float)scale;
    for (int i = 0; i < 8; ++i) {
      const int q = (quarter < 2 ? low[i] & 15 : low[i] >> 4) | (((high[i] >> (2 * quarter)) & 3) << 4);
      y[i] = d * (float)(q - 32);
    }
  }
};

struct Q2_K {
  static constexpr int kValues = 256, kBytes = 84;
  static __device__ void expand(const u8* b, int part, float* y) {
    const int half = part >> 4, quarter = (part >> 2) & 3, at = 8 * (part & 3);
    const u8 s = b[8 * half + 2 * quarter + (at >> 4)];
    const float d = half_at(b + 80) * (float)(s & 15), m = half_at(b + 82) * (float)(s >> 4);
    const u8* q = b + 16 + 32 * half + at;
    for (int i = 0; i < 8; ++i) y[i] = __fsub_rn(d * (float)((q[i] >> (2 * quarter)) & 3), m);
  }
};

struct Q3_K {
  static constexpr int kValues = 256, kBytes = 110;
  static __device__ void expand(const u8* b, int part, float* y) {
    const int half = part >> 4, quarter = (part >> 2) & 3, at = 8 * (part & 3);
    const int j = 8 * half + 2 * quarter + (at >> 4);  // of 16 scales
    const int low = j < 8 ? b[96 + j] & 15 : b[96 + j - 8] >> 4;
    const int scale = (low | (((b[104 + (j & 3)] >> (2 * (j >> 2))) & 3) << 4)) - 32;
    const float d = half_at(b + 108) * (float)scale;
    const u8 *high = b + at, *q = b + 32 + 32 * half + at;
    const int bit = 4 * half + quarter;
    for (int i = 0; i < 8; ++i)
      y[i] = d * (float)((int)((q[i] >> (2 * quarter)) & 3) - (((high[i] >> bit) & 1) ? 0 : 4));
  }
};

__device__ __forceinline__ void store8(float* out, const float* y) {
  reinterpret_cast<float4*>(out)[0] = make_float4(y[0], y[1], y[2], y[3]);
  reinterpret_cast<float4*>(out)[1] = make_float4(y[4], y[5], y[6], y[7]);
}

__device__ __forceinline__ void store8(__nv_bfloat16* out, const float* y) {
  __nv_bfloat162 pair[4];
  for (int i = 0; i < 4; ++i) pair[i] = __floats2bfloat162_rn(y[2 * i], y[2 * i + 1]);
  *reinterpret_cast<uint4*>(out) = *reinterpret_cast<uint4*>(pair);
}

__device__ __forceinline__ void store8(__half* out, const float* y) {
  __half2 pair[4];
  for (int i = 0; i < 4; ++i) pair[i] = __floats2half2_rn(y[2 * i], y[2 * i + 1]);
  *reinterpret_cast<uint4*>(out) = *reinterpret_cast<uint4*>(pair);
}

template <typename Format, typename Out>
__global__ void dequantize(const u8* __restrict__ raw, Out* __restrict__ out, u64 values_per_batch,
                           u64 batch_stride, u64 num_parts) {
  constexpr int kParts = Format::kValues / 8;
  const u64 parts_per_batch = values_per_batch / 8;
  for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < num_parts; at += (u64)gridDim.x * blockDim.x) {
    const u64 batch = at / parts_per_batch, part = at % parts_per_batch;
    const u8* block = raw + batch * batch_stride + part / kParts * Format::kBytes;
    float y[8];
    Format::expand(block, (int)(part % kParts), y);
    store8(out + at * 8, y);
  }
}
