// Vectors of floats as wide as the processor's registers, in GCC's vector extension (which clang has too).
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if !defined(TPSERVE_VECTOR_BYTES)
#if defined(__AVX512F__)
#define TPSERVE_VECTOR_BYTES 64
#elif defined(__AVX__)
#define TPSERVE_VECTOR_BYTES 32
#else
#define TPSERVE_VECTOR_BYTES 16
#endif
#endif

namespace tpserve {

constexpr int kLanes = TPSERVE_VECTOR_BYTES / 4;

// As many pairs of sums as fit into the registers beside what is added to them.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPairs = 12;
#else
constexpr int kPairs = 6;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// The upper half of a float.
struct bf16 {
  uint16_t bits;
};

inline Floats splat(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// GCC takes four instructions where these have one.
inline Words widen(Halves v) {
#if defined(__AVX512F__) && TPSERVE_VECTOR_BYTES == 64
  return (Words)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__) && TPSERVE_VECTOR_BYTES == 32
  return (Words)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, Words);
#endif
}

inline Floats load(const bf16* from) {
  Halves v;
  std::memcpy(&v, from, sizeof v);
  return (Floats)(widen(v) << 16);
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

// Rounds to nearest, ties to even; what is not a number stays so.
inline void store(bf16* to, Floats v) {
  Words bits = (Words)v;
  bits += 0x7fff + ((bits >> 16) & 1);
  Words nan = (Words)(v != v);
  Halves upper = __builtin_convertvector(((bits & ~nan) | (0x7fc00000 & nan)) >> 16, Halves);
  std::memcpy(to, &upper, sizeof upper);
}

// The same for the first `count` lanes where there are fewer; the others are 0.
template <typename T>
inline Floats load(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T some[kLanes] = {};
  std::memcpy(some, from, count * sizeof(T));
  return load(some);
}

template <typename T>
inline void store(T* to, Floats v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  T some[kLanes];
  store(some, v);
  std::memcpy(to, some, count * sizeof(T));
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float sum(Floats v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int step = kLanes / 2; step; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
  return lanes[0];
}

// e to the power of v, to 2e-7 of it: 2^n e^r with |r| <= ln(2) / 2, e^r as a polynomial (Moshier's, from Cephes).
inline Floats exp(Floats v) {
  v = v < -87.0f ? splat(-87.0f) : v;
  v = v > 88.0f ? splat(88.0f) : v;
  const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats shifted = v * 1.44269504f + shift;
  Floats n = shifted - shift;
  Floats r = v - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (Floats)((Ints)p + (((Ints)shifted - (Ints)shift) << 23));
}

}  // namespace tpserve
