// The steps of a layer between its products. Numbers are computed as floats, whatever they are stored as.
#pragma once

#include <cmath>

#include "vectors.h"

namespace tpserve {

// Numbers from which on threads share a step: below, waking them takes longer.
constexpr int64_t kShared = 32768;

// 1 / sqrt(mean(x^2) + eps) of one row.
template <typename T>
float inverse_norm(const T* x, int64_t size, float eps) {
  Floats squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats v = load(x + i, size - i);
    squares += v * v;
  }
  return 1.0f / std::sqrt(sum(squares) / size + eps);
}

template <typename T>
void norm_row(const T* x, const T* weight, int64_t size, float eps, T* out) {
  const float factor = inverse_norm(x, size, eps);
  for (int64_t i = 0; i < size; i += kLanes)
    store(out + i, load(x + i, size - i) * factor * load(weight + i, size - i), size - i);
}

// out = norm(x) of rows of `size`.
template <typename T>
void rms_norm(const T* x, const T* weight, int64_t rows, int64_t size, float eps, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size >= kShared)
  for (int64_t row = 0; row < rows; row++) norm_row(x + row * size, weight, size, eps, out + row * size);
}

// residual += x; x = norm(residual).
template <typename T>
void add_rms_norm(T* x, T* residual, const T* weight, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size >= kShared)
  for (int64_t row = 0; row < rows; row++) {
    T* in = x + row * size;
    T* total = residual + row * size;
    for (int64_t i = 0; i < size; i += kLanes) store(total + i, load(total + i, size - i) + load(in + i, size - i), size - i);
    norm_row(total, weight, size, eps, in);
  }
}

// out [rows][size] = silu(gate) * up, of rows gate | up.
template <typename T>
void silu_and_mul(const T* gate_up, int64_t rows, int64_t size, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size >= kShared)
  for (int64_t row = 0; row < rows; row++) {
    const T* gate = gate_up + 2 * row * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats v = load(gate + i, size - i);
      store(out + row * size + i, v / (1.0f + exp(-v)) * load(gate + size + i, size - i), size - i);
    }
  }
}

// Turns one head, whose two halves are the first and second numbers of its pairs, after multiplying it with
// `factor` and a weight where there is one.
template <typename T>
void rotate_head(const T* head, const float* cos_sin, int64_t size, const T* weight, float eps, T* out) {
  const float factor = weight ? inverse_norm(head, size, eps) : 1.0f;
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    Floats first = load(head + i, left), second = load(head + half + i, left);
    if (weight) {
      first *= factor * load(weight + i, left);
      second *= factor * load(weight + half + i, left);
    }
    const Floats cos = load(cos_sin + i, left), sin = load(cos_sin + half + i, left);
    store(out + i, first * cos - second * sin, left);
    store(out + half + i, second * cos + first * sin, left);
  }
}

// Rotates the queries of qkv [tokens][q_heads + 2 * kv_heads][size] in place, and writes keys, rotated, and values into
// the caches' cells.
template <typename T>
void rotate_and_store(T* qkv, const float* cos_sin, T* k_cache, T* v_cache, const int64_t* cells, const T* q_norm,
                      const T* k_norm, float eps, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t size,
                      int threads) {
  const int64_t token_size = (q_heads + 2 * kv_heads) * size;
#pragma omp parallel for num_threads(threads) if (tokens * token_size >= kShared)
  for (int64_t token = 0; token < tokens; token++) {
    T* heads = qkv + token * token_size;
    const float* angles = cos_sin + token * size;
    for (int64_t h = 0; h < q_heads; h++)
      rotate_head(heads + h * size, angles, size, q_norm, eps, heads + h * size);
    const int64_t cell = cells[token] * kv_heads * size;
    for (int64_t h = 0; h < kv_heads; h++)
      rotate_head(heads + (q_heads + h) * size, angles, size, k_norm, eps, k_cache + cell + h * size);
    std::memcpy(v_cache + cell, heads + (q_heads + kv_heads) * size, kv_heads * size * sizeof(T));
  }
}

}  // namespace tpserve
