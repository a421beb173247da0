// One thread's part of paged attention: some rows of one sequence over some or all parts of the keys they see.
//
// Softmax is taken in parts of kPart keys that are then joined in order, by whichever thread comes last where several
// had a share. A task that covers all parts does just the same in a loop, so no result depends on the cut.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "attention_plan.h"
#include "attention_tile.h"
#include "kv_pool.h"

namespace horde {
namespace {

constexpr int64_t kDirectRows = 2 * kRows;  // up to here, unpacking a bf16 tile costs more than reading it again

// Memory of one thread, aligned to cache lines, growing only.
class Scratch {
  public:
    float* floats(int64_t count) {
        if (count > size_) {
            memory_.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(round_up(count, 16)) * 4)));
            size_ = count;
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    std::unique_ptr<float, Free> memory_;
    int64_t size_ = 0;
};

// Softmax over the keys of some parts: as `Softmax`, with the sums of a row taken together.
struct Joined {
    float* largest;
    float* sums;
    float* values;

    Joined(float* memory, int64_t rows)
        : largest(memory), sums(memory + round_up(rows, 16)), values(memory + 2 * round_up(rows, 16)) {}
};

__attribute__((noinline)) void join(const Joined& into, const Joined& more, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; ++r) {
        const float largest = std::max(into.largest[r], more.largest[r]);
        if (largest == -kInfinity) continue;
        const float fade = exp(into.largest[r] - largest), weight = exp(more.largest[r] - largest);
        into.largest[r] = largest;
        into.sums[r] = into.sums[r] * fade + more.sums[r] * weight;
        float* values = into.values + r * width;
        for (int64_t c = 0; c < width; c += kLanes)
            store(values + c, load(values + c) * broadcast(fade) +
                                  load(more.values + r * width + c) * broadcast(weight));
    }
}

// A group of keys by its block's place in the table and its own place in the block; steps without a division.
struct Place {
    int64_t block, place, block_size;

    Place(int64_t key, int64_t size) : block(key / size), place(key % size), block_size(size) {}
    int64_t key() const { return block * block_size + place; }
    void advance() {
        place += kLanes;
        if (place >= block_size) place = 0, ++block;
    }
};

template <typename P>
class Worker {
  public:
    Worker(const HordePool& pool, int64_t width, Scratch& scratch) : pool_(pool), width_(width) {
        const int64_t key_size = pool.key_size, joined = joined_floats(kTaskRows, width);
        const int64_t counts[] = {kTaskRows * key_size, joined, joined, kTaskRows * kLanes, kTile * key_size,
                                  kTile * width};
        int64_t total = 0;
        for (int64_t count : counts) total += round_up(count, 16);
        float* at[6];
        float* next = scratch.floats(total);
        for (int i = 0; i < 6; ++i) {
            at[i] = next;
            next += round_up(counts[i], 16);
        }
        queries_ = at[0];
        all_ = at[1];
        part_ = at[2];
        lane_sums_ = at[3];
        packed_keys_ = at[4];
        packed_values_ = at[5];
    }

    // `workspace` holds the plan's partials of every kv head.
    template <typename Q>
    void run(const Call<Q>& call, Plan& plan, const Task& task, int64_t head, float* workspace) {
        read_queries(call, task, head);
        const Joined all(all_, task.rows), part(part_, task.rows);
        for (int64_t p = 0; p < task.parts; ++p) {
            // The first part is not joined to nothing: it is where the others go.
            attend_part(call, task, head, task.first_part + p, p == 0 ? all : part);
            if (p > 0) join(all, part, task.rows, width_);
        }
        if (task.split < 0)
            finish(call, task, head, all);
        else
            hand_in(call, plan, task, head, workspace);
    }

  private:
    // Puts the part beside the others of its rows; the one who is last joins them in order.
    template <typename Q>
    void hand_in(const Call<Q>& call, Plan& plan, const Task& task, int64_t head, float* workspace) {
        const Split& split = plan.splits[static_cast<size_t>(task.split)];
        const int64_t floats = joined_floats(task.rows, width_), first = call.first_part(task);
        float* partials = workspace + head * plan.partial_floats + split.partials;
        std::copy(all_, all_ + floats, partials + (task.first_part - first) * floats);
        int64_t* missing = &plan.missing[static_cast<size_t>(split.missing + head)];
        if (__atomic_sub_fetch(missing, 1, __ATOMIC_ACQ_REL) > 0) return;
        const Joined whole(partials, task.rows);
        for (int64_t p = 1; p <= call.last_part(task) - first; ++p)
            join(whole, Joined(partials + p * floats, task.rows), task.rows, width_);
        finish(call, task, head, whole);
    }

    template <typename Q>
    void read_queries(const Call<Q>& call, const Task& task, int64_t head) {
        const int64_t group = call.group(), size = pool_.key_size, start = call.step.query_starts[task.sequence];
        const int64_t position = call.position(task.sequence);
        for (int64_t r = 0; r < task.rows; ++r) {
            const int64_t row = task.first_row + r;
            const Q* from = call.query.at(start + row / group, head * group + row % group);
            for (int64_t d = 0; d < size; ++d) queries_[r * size + d] = call.scale * to_float(from[d]);
            positions_[r] = position + row / group;
        }
    }

    template <typename Q>
    void attend_part(const Call<Q>& call, const Task& task, int64_t head, int64_t part, const Joined& to) {
        const int64_t begin = std::max(call.key_begin(task), part * kPart);
        const int64_t end = std::min(call.key_end(task), (part + 1) * kPart);
        std::fill(to.largest, to.largest + task.rows, -kInfinity);
        std::fill(lane_sums_, lane_sums_ + task.rows * kLanes, 0.0f);
        std::fill(to.values, to.values + task.rows * width_, 0.0f);
        const bool aligned = pool_.block_size % kLanes == 0 && pool_.value_size % kLanes == 0;
        const bool direct = aligned && (sizeof(P) == sizeof(float) || task.rows <= kDirectRows);
        const int32_t* table = call.step.block_tables + task.sequence * call.step.table_stride;
        const int64_t first = call.key_begin(task) / kTile * kTile, last = call.key_end(task);
        for (int64_t start = begin / kTile * kTile; start < end; start += kTile) {
            const int64_t from = std::max(begin, start), until = std::min(end, start + kTile);
            if (direct)
                attend_rows(call, task, find(table, head, start, from, until, first, last), start, from, until, to);
            else
                attend_rows(call, task, pack(table, head, start, from, until), start, from, until, to);
        }
        for (int64_t r = 0; r < task.rows; ++r) to.sums[r] = sum_of_lanes(load(lane_sums_ + r * kLanes));
    }

    template <typename Q, typename T>
    void attend_rows(const Call<Q>& call, const Task& task, const Tile<T>& tile, int64_t start, int64_t from,
                     int64_t until, const Joined& to) {
        const int64_t size = pool_.key_size, blocks = (task.rows + kRows - 1) / kRows;
        const int64_t step = (task.rows + blocks - 1) / blocks;
        for (int64_t r = 0; r < task.rows; r += step) {
            const Softmax state{to.largest + r, lane_sums_ + r * kLanes, to.values + r * width_, width_};
            attend_tile(tile, start, from, until, queries_ + r * size, size, positions_ + r,
                        static_cast<int>(std::min(step, task.rows - r)), call.scoring, state);
        }
    }

    // The tile where it lies in the pools; groups without a key in [from, until) are left out.
    // After the last tile, which ends at key `last`, comes the first of the next head, which starts at `first`.
    Tile<P> find(const int32_t* table, int64_t head, int64_t start, int64_t from, int64_t until, int64_t first,
                 int64_t last) const {
        Tile<P> tile{{}, pool_.block_size, {}, pool_.value_size, {}, {}};
        const bool ends = start + kTile >= last;
        const int64_t next_head = std::min(head + ends, pool_.kv_heads - 1);
        Place here(start + (from - start) / kLanes * kLanes, pool_.block_size);
        Place there((ends ? first : start + kTile) + (from - start) / kLanes * kLanes, pool_.block_size);
        for (int64_t key = here.key(); key < until; key += kLanes, here.advance(), there.advance()) {
            const int64_t g = (key - start) / kLanes, block = table[here.block];
            const int64_t next = table[there.key() < last ? there.block : here.block];
            tile.keys[g] = key_at<P>(pool_, block, head, here.place);
            tile.values[g] = value_at<P>(pool_, block, head, here.place);
            tile.next_keys[g] = key_at<P>(pool_, next, next_head, there.place);
            tile.next_values[g] = value_at<P>(pool_, next, next_head, there.place);
        }
        return tile;
    }

    // The tile copied out of the pools as floats, with the values of a key padded to whole vectors.
    Tile<float> pack(const int32_t* table, int64_t head, int64_t start, int64_t from, int64_t until) {
        if (pool_.block_size % kLanes == 0) {
            for (int64_t g = (from - start) / kLanes; start + g * kLanes < until; ++g) {
                const int64_t key = start + g * kLanes, block = table[key / pool_.block_size];
                const P* keys = key_at<P>(pool_, block, head, key % pool_.block_size);
                for (int64_t d = 0; d < pool_.key_size; ++d)
                    store(packed_keys_ + d * kTile + g * kLanes, load(keys + d * pool_.block_size));
            }
        } else {
            for (int64_t key = from; key < until; ++key) {
                const P* at = key_at<P>(pool_, table[key / pool_.block_size], head, key % pool_.block_size);
                for (int64_t d = 0; d < pool_.key_size; ++d)
                    packed_keys_[d * kTile + key - start] = to_float(at[d * pool_.block_size]);
            }
        }
        for (int64_t key = from; key < until; ++key) {
            const P* values = value_at<P>(pool_, table[key / pool_.block_size], head, key % pool_.block_size);
            float* to = packed_values_ + (key - start) * width_;
            int64_t c = 0;
            for (; c + kLanes <= pool_.value_size; c += kLanes) store(to + c, load(values + c));
            if (c < width_) store(to + c, load_part(values + c, pool_.value_size - c));
        }
        Tile<float> tile{{}, kTile, {}, width_, {}, {}};
        for (int64_t g = 0; g < kGroups; ++g) {
            tile.keys[g] = tile.next_keys[g] = packed_keys_ + g * kLanes;
            tile.values[g] = tile.next_values[g] = packed_values_ + g * kLanes * width_;
        }
        return tile;
    }

    template <typename Q>
    void finish(const Call<Q>& call, const Task& task, int64_t head, const Joined& all) {
        const int64_t group = call.group(), size = pool_.value_size, start = call.step.query_starts[task.sequence];
        for (int64_t r = 0; r < task.rows; ++r) {
            const int64_t row = task.first_row + r, query_head = head * group + row % group;
            float fade = 1, sum = all.sums[r];
            if (call.sinks != nullptr) {
                const float sink = call.sinks[query_head], largest = std::max(all.largest[r], sink);
                fade = exp(all.largest[r] - largest);
                sum = sum * fade + exp(sink - largest);
            }
            const Vec share = broadcast(fade / sum);
            const float* from = all.values + r * width_;
            Q* to = call.out + ((start + row / group) * pool_.query_heads + query_head) * size;
            int64_t c = 0;
            for (; c + kLanes <= size; c += kLanes) store(to + c, load(from + c) * share);
            if (c < size) store_part(to + c, load(from + c) * share, size - c);
        }
    }

    const HordePool& pool_;
    int64_t width_;
    float *queries_, *all_, *part_, *lane_sums_, *packed_keys_, *packed_values_;
    int64_t positions_[kTaskRows];
};

}  // namespace
}  // namespace horde
