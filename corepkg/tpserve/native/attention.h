// Attention of sequences with one new token each, over a paged cache that is read in place.
//
// A sequence's keys are cut into pieces of kPiece positions, counted from 0. Each piece is computed on its own, and the
// pieces of a sequence are put together in order: neither other sequences nor the number of threads change a bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "vectors.h"

namespace tpserve {

constexpr int64_t kPiece = 64;

// Keys between the one that memory is asked for and the one that is read.
constexpr int64_t kKeysAhead = 16;

// Query heads that share each load of a key or value.
constexpr int kHeads = 4;

// A step's sequences and one layer's cache [pages][page_size][kv_heads][size]; queries and results are [q_heads][size],
// the size a multiple of kLanes.
template <typename T>
struct Decode {
  const T* queries;
  int64_t stride;  // from one sequence's query to the next
  T* out;
  const T* keys;
  const T* values;
  const int32_t* page_table;
  int64_t max_pages;
  const int64_t* slots;    // of each sequence in the table
  const int32_t* lengths;  // of each sequence, the new token included
  int64_t sequences, q_heads, kv_heads, size, page_size;
  int64_t window;  // 0 for none
  float scale;
  float soft_cap;  // 0 for none

  int64_t first_seen(int64_t i) const { return window ? std::max<int64_t>(0, lengths[i] - window) : 0; }
  int64_t first_piece(int64_t i) const { return first_seen(i) / kPiece; }
  int64_t pieces(int64_t i) const { return (lengths[i] + kPiece - 1) / kPiece - first_piece(i); }
};

// The scores of G heads with N keys.
template <int G, int N, typename T>
void score(const float* queries, const T* keys, const int64_t* cells, int64_t size, float* scores) {
  Floats products[G][N];
  for (auto& row : products) std::fill_n(row, N, Floats{});
  for (int64_t i = 0; i < size; i += kLanes) {
    Floats parts[N];
    for (int n = 0; n < N; n++) parts[n] = load(keys + cells[n] + i);
    for (int g = 0; g < G; g++) {
      const Floats query = load(queries + g * size + i);
      for (int n = 0; n < N; n++) products[g][n] += query * parts[n];
    }
  }
  for (int g = 0; g < G; g++)
    for (int n = 0; n < N; n++) scores[g * kPiece + n] = sum(products[g][n]);
}

// N vectors of the values at `cells`, weighted and added up, for G heads.
template <int G, int N, typename T>
void gather(const T* values, const int64_t* cells, int64_t count, const float* weights, int64_t size, float* out) {
  Floats totals[G][N];
  for (auto& row : totals) std::fill_n(row, N, Floats{});
  for (int64_t j = 0; j < count; j++)
    for (int n = 0; n < N; n++) {
      const Floats part = load(values + cells[j] + n * kLanes);
      for (int g = 0; g < G; g++) totals[g][n] += part * weights[g * kPiece + j];
    }
  for (int g = 0; g < G; g++)
    for (int n = 0; n < N; n++) store(out + g * size + n * kLanes, totals[g][n]);
}

// Asks for two keys or values: heads lie in steps that the processor does not foresee.
template <typename T>
void fetch(const T* from, const int64_t* cells, int64_t size) {
  for (int n = 0; n < 2; n++)
    for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(from + cells[n] + i);
}

// Turns scores into weights relative to the largest; gives their sum and that score.
inline void weigh(float* scores, int64_t count, float soft_cap, float& total, float& largest) {
  if (soft_cap)
    for (int64_t j = 0; j < count; j++) scores[j] = soft_cap * std::tanh(scores[j] / soft_cap);
  // What lies behind the last score weighs nothing.
  for (int64_t j = count; j % kLanes; j++) scores[j] = -std::numeric_limits<float>::infinity();
  Floats most = load(scores);
  for (int64_t j = kLanes; j < count; j += kLanes) most = larger(most, load(scores + j));
  largest = most[0];
  for (int i = 1; i < kLanes; i++) largest = std::max(largest, most[i]);
  Floats sums = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    const Floats weights = exp(load(scores + j) - largest);
    store(scores + j, weights);
    sums += weights;
  }
  total = sum(sums);
}

// G heads over a piece: `sums` gets the weighted values [G][size], `totals` the weights' sum and largest score [G][2].
template <typename T, int G>
void attend(const Decode<T>& step, const float* queries, const int64_t* cells, int64_t count, float* sums, float* totals) {
  alignas(64) float scores[G * kPiece];
  int64_t j = 0;
  for (; j + 1 < count; j += 2) {
    fetch(step.keys, cells + std::min(j + kKeysAhead, count - 2), step.size);
    fetch(step.values, cells + j, step.size);
    score<G, 2>(queries, step.keys, cells + j, step.size, scores + j);
  }
  if (j < count) score<G, 1>(queries, step.keys, cells + j, step.size, scores + j);
  for (int g = 0; g < G; g++) weigh(scores + g * kPiece, count, step.soft_cap, totals[2 * g], totals[2 * g + 1]);
  int64_t i = 0;
  for (; i + kLanes < step.size; i += 2 * kLanes)
    gather<G, 2>(step.values + i, cells, count, scores, step.size, sums + i);
  if (i < step.size) gather<G, 1>(step.values + i, cells, count, scores, step.size, sums + i);
}

template <typename T, int G = kHeads>
void attend_heads(int64_t heads, const Decode<T>& step, const float* queries, const int64_t* cells, int64_t count,
                  float* sums, float* totals) {
  if (heads == G) return attend<T, G>(step, queries, cells, count, sums, totals);
  if constexpr (G > 1) attend_heads<T, G - 1>(heads, step, queries, cells, count, sums, totals);
}

// All query heads of one KV head over one piece of sequence i.
template <typename T>
void attend_piece(const Decode<T>& step, int64_t i, int64_t piece, int64_t head, float* sums, float* totals) {
  const int64_t begin = std::max(step.first_seen(i), piece * kPiece);
  const int64_t count = std::min<int64_t>(step.lengths[i], (piece + 1) * kPiece) - begin;
  const int32_t* pages = step.page_table + step.slots[i] * step.max_pages;
  int64_t cells[kPiece];
  pages += begin / step.page_size;
  for (int64_t j = 0, offset = begin % step.page_size; j < count; j++) {
    cells[j] = ((*pages * step.page_size + offset) * step.kv_heads + head) * step.size;
    if (++offset == step.page_size) offset = 0, pages++;
  }
  const int64_t group = step.q_heads / step.kv_heads, size = step.size;
  const T* queries = step.queries + i * step.stride + head * group * size;
  std::unique_ptr<float[]> scaled(new float[kHeads * size]);
  for (int64_t first = 0; first < group; first += kHeads) {
    const int64_t heads = std::min<int64_t>(kHeads, group - first);
    for (int64_t at = 0; at < heads * size; at += kLanes)
      store(scaled.get() + at, load(queries + first * size + at) * step.scale);
    attend_heads<T>(heads, step, scaled.get(), cells, count, sums + first * size, totals + 2 * first);
  }
}

// Puts the pieces of one query head together; from one piece to the next are `heads` heads.
template <typename T>
void combine(const float* sums, const float* totals, int64_t pieces, int64_t heads, int64_t size, T* out) {
  float largest = totals[1];
  for (int64_t p = 1; p < pieces; p++) largest = std::max(largest, totals[2 * p * heads + 1]);
  const auto share = [&](int64_t p) { return std::exp(totals[2 * p * heads + 1] - largest); };
  float total = 0;
  for (int64_t p = 0; p < pieces; p++) total += totals[2 * p * heads] * share(p);
  for (int64_t at = 0; at < size; at += kLanes) {
    Floats all = {};
    for (int64_t p = 0; p < pieces; p++) all += load(sums + p * heads * size + at) * share(p);
    store(out + at, all / total);
  }
}

template <typename T>
void decode(const Decode<T>* call, int threads) {
  const Decode<T>& step = *call;
  const int64_t heads = step.q_heads, size = step.size, group = heads / step.kv_heads;
  std::vector<int64_t> starts(step.sequences + 1, 0);  // of each sequence's pieces among all
  for (int64_t i = 0; i < step.sequences; i++) starts[i + 1] = starts[i] + step.pieces(i);
  const int64_t pieces = starts.back();
  std::unique_ptr<float[]> sums(new float[pieces * heads * size]), totals(new float[pieces * heads * 2]);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int64_t item = 0; item < pieces * step.kv_heads; item++) {
      const int64_t place = item / step.kv_heads, head = item % step.kv_heads, first = place * heads + head * group;
      const int64_t i = std::upper_bound(starts.begin(), starts.end(), place) - starts.begin() - 1;
      const int64_t piece = step.first_piece(i) + place - starts[i];
      attend_piece(step, i, piece, head, sums.get() + first * size, totals.get() + 2 * first);
    }
#pragma omp for
    for (int64_t item = 0; item < step.sequences * heads; item++) {
      const int64_t i = item / heads, first = starts[i] * heads + item % heads;
      combine(sums.get() + first * size, totals.get() + 2 * first, starts[i + 1] - starts[i], heads, size,
              step.out + item * size);
    }
  }
}

}  // namespace tpserve
