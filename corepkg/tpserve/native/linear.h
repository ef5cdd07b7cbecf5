// Matrix products with a weight in panels: [outputs / kWidth][depth][kWidth], the last panel filled up with zeros.
//
// Every sum runs over the depth from 0 on, in steps of one fused multiply-add: neither the number of rows nor that of
// threads changes a bit of it.
#pragma once

#include <algorithm>
#include <memory>

#include "vectors.h"

namespace tpserve {

constexpr int kWidth = 2 * kLanes;

// Of a panel, what stays in the first-level cache while rows take turns with it.
constexpr int64_t kPanelBytes = 16384;

// How far ahead of a single block of rows memory is asked for.
constexpr int64_t kAheadBytes = 2048;

// Adds the products of R rows with a part of a panel to their sums [R][kWidth].
template <typename T, int R>
void add_tile(const float* x, int64_t stride, const T* panel, int64_t depth, const T* ahead, float* sums) {
  Floats low[R], high[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    low[r] = load(sums + r * kWidth);
    high[r] = load(sums + r * kWidth + kLanes);
  }
  for (int64_t k = 0; k < depth; k++) {
    __builtin_prefetch(ahead + k * kWidth);
    const Floats first = load(panel + k * kWidth), second = load(panel + k * kWidth + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const float factor = x[r * stride + k];
      low[r] += first * factor;
      high[r] += second * factor;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    store(sums + r * kWidth, low[r]);
    store(sums + r * kWidth + kLanes, high[r]);
  }
}

template <typename T, int R = kPairs>
void add_rows(int64_t rows, const float* x, int64_t stride, const T* panel, int64_t depth, const T* ahead, float* sums) {
  if (rows == R) return add_tile<T, R>(x, stride, panel, depth, ahead, sums);
  if constexpr (R > 1) add_rows<T, R - 1>(rows, x, stride, panel, depth, ahead, sums);
}

// The sums [rows][kWidth] of all rows with one panel.
template <typename T>
void add_panel(const float* x, int64_t stride, int64_t rows, const T* panel, int64_t depth, float* sums) {
  const bool once = rows <= kPairs;
  const int64_t step = once ? depth : kPanelBytes / (kWidth * sizeof(T));
  const int64_t distance = once ? kAheadBytes / sizeof(T) : step * kWidth;
  for (int64_t k = 0; k < depth; k += step) {
    const T* part = panel + k * kWidth;
    for (int64_t row = 0; row < rows; row += kPairs)
      add_rows<T>(std::min<int64_t>(kPairs, rows - row), x + row * stride + k, stride, part,
                  std::min(step, depth - k), part + distance, sums + row * kWidth);
  }
}

inline const float* as_floats(const float* x, int64_t&, int64_t, int64_t, float*) { return x; }

inline const float* as_floats(const bf16* x, int64_t& stride, int64_t rows, int64_t depth, float* floats) {
#pragma omp for
  for (int64_t row = 0; row < rows; row++)
    for (int64_t k = 0; k < depth; k += kLanes)
      store(floats + row * depth + k, load(x + row * stride + k, depth - k), depth - k);
  stride = depth;
  return floats;
}

// out [rows][outputs] = x [rows][depth], its rows `stride` apart, times the weight, plus the bias where there is one.
template <typename T>
void linear(const T* x, int64_t stride, int64_t rows, int64_t depth, const T* panels, const T* bias, T* out,
            int64_t outputs, int threads) {
  std::unique_ptr<float[]> floats(sizeof(T) < sizeof(float) ? new float[rows * depth] : nullptr);
#pragma omp parallel num_threads(threads)
  {
    int64_t apart = stride;
    const float* in = as_floats(x, apart, rows, depth, floats.get());
    std::unique_ptr<float[]> sums(new float[rows * kWidth]);
#pragma omp for
    for (int64_t first = 0; first < outputs; first += kWidth) {
      const int64_t width = std::min<int64_t>(kWidth, outputs - first);
      std::fill_n(sums.get(), rows * kWidth, 0.0f);
      add_panel(in, apart, rows, panels + first * depth, depth, sums.get());
      for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += kLanes) {
          Floats total = load(sums.get() + row * kWidth + i);
          if (bias) total += load(bias + first + i, width - i);
          store(out + row * outputs + first + i, total, width - i);
        }
    }
  }
}

}  // namespace tpserve
