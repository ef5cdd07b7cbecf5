// Matrix products with a weight in panels: [outputs / kWidth][depth][kWidth], the last panel filled up with zeros. Of
// bfloat16, outputs i and i + kLanes of a panel lie side by side.
//
// Every sum runs over the depth from 0 on, in steps of one fused multiply-add: neither the number of rows nor that of
// threads changes a bit of it.
#pragma once

#include <omp.h>

#include <algorithm>
#include <memory>

#include "vectors.h"

namespace tpserve {

constexpr int kWidth = 2 * kLanes;

// What of a panel stays in the first-level cache while rows take turns with it.
constexpr int64_t kPart = 4096;

// How far ahead of a single panel memory is asked for, in bytes.
constexpr int64_t kAhead = 2048;

// How many panels are read side by side where few rows leave room: memory answers several streams faster than one.
constexpr int streams(int rows) { return std::clamp(kPairs / rows, 1, 4); }

inline void load_pair(const float* from, Floats& low, Floats& high) {
  low = load(from);
  high = load(from + kLanes);
}

inline void load_pair(const bf16* from, Floats& low, Floats& high) {
  Words v;
  std::memcpy(&v, from, sizeof v);
  low = (Floats)(v << 16);
  high = (Floats)(v & 0xffff0000);
}

// Adds the products of R rows with P panels, `apart` from each other, to their sums [P][R][kWidth]. With a single panel
// as much memory is asked for from `ahead` on.
template <int R, int P, typename T>
void add_tile(const float* x, int64_t stride, const T* panels, int64_t apart, int64_t depth, const char* ahead,
              float* sums) {
  Floats low[P][R], high[P][R];
#pragma GCC unroll 12
  for (int p = 0; p < P; p++)
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      low[p][r] = load(sums + (p * R + r) * kWidth);
      high[p][r] = load(sums + (p * R + r) * kWidth + kLanes);
    }
  for (int64_t k = 0; k < depth; k++) {
    if (P == 1) __builtin_prefetch(ahead + k * kWidth * sizeof(T));
#pragma GCC unroll 12
    for (int p = 0; p < P; p++) {
      Floats first, second;
      load_pair(panels + p * apart + k * kWidth, first, second);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const float factor = x[r * stride + k];
        low[p][r] += first * factor;
        high[p][r] += second * factor;
      }
    }
  }
#pragma GCC unroll 12
  for (int p = 0; p < P; p++)
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      store(sums + (p * R + r) * kWidth, low[p][r]);
      store(sums + (p * R + r) * kWidth + kLanes, high[p][r]);
    }
}

template <int R, int P, typename... Args>
void choose_panels(int64_t panels, Args... args) {
  if (panels == P) return add_tile<R, P>(args...);
  if constexpr (P > 1) choose_panels<R, P - 1>(panels, args...);
}

template <int R = kPairs, typename... Args>
void add_rows(int64_t rows, int64_t panels, Args... args) {
  if (rows == R) return choose_panels<R, streams(R)>(panels, args...);
  if constexpr (R > 1) add_rows<R - 1>(rows, panels, args...);
}

// Part of a panel as floats, with outputs in order.
inline const float* widen(const float* part, int64_t, float*) { return part; }

inline const float* widen(const bf16* part, int64_t count, float* wide) {
  for (int64_t i = 0; i < count; i += kWidth) {
    Floats low, high;
    load_pair(part + i, low, high);
    store(wide + i, low);
    store(wide + i + kLanes, high);
  }
  return wide;
}

// The sums [rows][kWidth] of many rows with one panel: they take turns with each part of it.
template <typename T>
void add_panel(const float* x, int64_t stride, int64_t rows, const T* panel, int64_t depth, float* sums) {
  float wide[kPart];
  constexpr int64_t step = kPart / kWidth;
  for (int64_t k = 0; k < depth; k += step) {
    const int64_t count = std::min(step, depth - k);
    const T* next = panel + (k + step) * kWidth;
    const float* part = widen(panel + k * kWidth, count * kWidth, wide);
    for (int64_t row = 0; row < rows; row += kPairs)
      add_rows(std::min<int64_t>(kPairs, rows - row), 1, x + row * stride + k, stride, part, 0, count,
               (const char*)next, sums + row * kWidth);
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

// The outputs `first` … of one panel, from their sums [rows][kWidth].
template <typename T>
void write_panel(const float* sums, int64_t rows, int64_t first, const T* bias, T* out, int64_t outputs) {
  const int64_t width = std::min<int64_t>(kWidth, outputs - first);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < width; i += kLanes) {
      Floats total = load(sums + row * kWidth + i);
      if (bias) total += load(bias + first + i, width - i);
      store(out + row * outputs + first + i, total, width - i);
    }
}

// out [rows][outputs] = x [rows][depth], its rows `stride` apart, times the weight, plus the bias where there is one.
template <typename T>
void linear(const T* x, int64_t stride, int64_t rows, int64_t depth, const T* panels, const T* bias, T* out,
            int64_t outputs, int threads) {
  const int64_t count = (outputs + kWidth - 1) / kWidth, size = depth * kWidth;
  const int64_t together = rows && rows <= kPairs ? streams(rows) : 1;
  std::unique_ptr<float[]> floats(sizeof(T) < sizeof(float) ? new float[rows * depth] : nullptr);
#pragma omp parallel num_threads(threads)
  {
    int64_t apart = stride;
    const float* in = as_floats(x, apart, rows, depth, floats.get());
    std::unique_ptr<float[]> sums(new float[together * rows * kWidth]);
    const int64_t thread = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t end = count * (thread + 1) / all;
    for (int64_t at = count * thread / all; at < end; at += together) {
      const int64_t some = std::min(together, end - at);
      std::fill_n(sums.get(), some * rows * kWidth, 0.0f);
      if (rows <= kPairs)
        add_rows(rows, some, in, apart, panels + at * size, size, depth, (const char*)(panels + at * size) + kAhead,
                 sums.get());
      else
        add_panel(in, apart, rows, panels + at * size, depth, sums.get());
      for (int64_t p = 0; p < some; p++)
        write_panel(sums.get() + p * rows * kWidth, rows, (at + p) * kWidth, bias, out, outputs);
    }
  }
}

}  // namespace tpserve
