// How the work of one call of paged attention is cut into tasks for the threads.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_tile.h"
#include "kv_pool.h"

namespace horde {
namespace {

constexpr int64_t kPart = 256;          // keys; a multiple of kTile
constexpr int64_t kTaskRows = 72;       // a multiple of kRows, and of most counts of heads that share a key
constexpr int64_t kTasksPerThread = 4;  // so many make an even load

constexpr int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// Rows of one sequence, over `parts` parts of kPart keys each.
struct Task {
    int64_t sequence;
    int64_t first_row;  // token * group + head within the group, over the sequence's tokens of this step
    int64_t rows;
    int64_t first_part;
    int64_t parts;
    int64_t split;  // index into the plan's splits, or -1 where the task has all parts that its rows see
    int64_t cost;
};

template <typename Q>
struct Call {
    const HordeStep& step;
    const HordePool& pool;
    Rows<const Q> query;
    Q* out;
    const float* sinks;
    float scale;
    Scoring scoring;

    int64_t group() const { return pool.query_heads / pool.kv_heads; }
    int64_t width() const { return round_up(pool.value_size, kLanes); }

    // Of the sequence's first token in this step.
    int64_t position(int64_t sequence) const {
        const int32_t* starts = step.query_starts + sequence;
        return step.context_lengths[sequence] - (starts[1] - starts[0]);
    }

    // The keys [key_begin, key_end) are those that some row of the task sees.
    int64_t key_begin(const Task& task) const {
        const int64_t first = position(task.sequence) + task.first_row / group();
        return scoring.window > 0 ? std::max<int64_t>(0, first + 1 - scoring.window) : 0;
    }
    int64_t key_end(const Task& task) const {
        return position(task.sequence) + (task.first_row + task.rows - 1) / group() + 1;
    }
    int64_t first_part(const Task& task) const { return key_begin(task) / kPart; }
    int64_t last_part(const Task& task) const { return (key_end(task) - 1) / kPart; }
};

// Rows whose parts are computed by several tasks. `missing` and `partials` are those of kv head 0.
struct Split {
    int64_t missing;   // index of the count of parts that are not there yet; those of the other heads follow
    int64_t partials;  // where the results of the parts lie, in floats; those of a head lie `partial_floats` further
};

struct Plan {
    std::vector<Task> tasks;  // the costliest first; each is done for every kv head
    std::vector<Split> splits;
    std::vector<int64_t> missing;
    int64_t partial_floats = 0;
    int64_t values = 0;  // of the cache that are read
};

// What the softmax of some rows over some parts takes in memory: see `Joined`.
constexpr int64_t joined_floats(int64_t rows, int64_t width) { return 2 * round_up(rows, 16) + rows * width; }

template <typename Q>
void add_tasks(const Call<Q>& call, int64_t sequence, Plan& plan) {
    const int64_t rows = (call.step.query_starts[sequence + 1] - call.step.query_starts[sequence]) * call.group();
    if (rows <= 0) return;
    const int64_t cuts = (rows + kTaskRows - 1) / kTaskRows;
    const int64_t size = rows <= kTaskRows ? rows : round_up((rows + cuts - 1) / cuts, kRows);
    for (int64_t first = 0; first < rows; first += size) {
        Task task{sequence, first, std::min(size, rows - first), 0, 0, -1, 0};
        const int64_t keys = call.key_end(task) - call.key_begin(task);
        task.first_part = call.first_part(task);
        task.parts = call.last_part(task) - task.first_part + 1;
        task.cost = (task.rows + kRows - 1) / kRows * keys;
        plan.values += keys * call.pool.kv_heads * (call.pool.key_size + call.pool.value_size);
        plan.tasks.push_back(task);
    }
}

// Leaves the first of the task's parts to it, and makes tasks of the others.
template <typename Q>
void split_task(const Call<Q>& call, size_t index, Plan& plan) {
    const int64_t parts = plan.tasks[index].parts, first = plan.tasks[index].first_part;
    plan.tasks[index].split = static_cast<int64_t>(plan.splits.size());
    plan.tasks[index].parts = 1;
    plan.tasks[index].cost /= parts;
    plan.splits.push_back({static_cast<int64_t>(plan.missing.size()), plan.partial_floats});
    plan.missing.insert(plan.missing.end(), static_cast<size_t>(call.pool.kv_heads), parts);
    plan.partial_floats += parts * joined_floats(plan.tasks[index].rows, call.width());
    for (int64_t part = 1; part < parts; ++part) {
        Task task = plan.tasks[index];
        task.first_part = first + part;
        plan.tasks.push_back(task);
    }
}

template <typename Q>
void make_plan(const Call<Q>& call, int64_t threads, Plan& plan) {
    plan.tasks.clear();
    plan.splits.clear();
    plan.missing.clear();
    plan.partial_floats = plan.values = 0;
    for (int64_t s = 0; s < call.step.sequences; ++s) add_tasks(call, s, plan);
    int64_t cost = 0;
    for (const Task& task : plan.tasks) cost += task.cost;
    // What is too large a piece of the whole is computed part by part.
    const int64_t most = cost * call.pool.kv_heads / (kTasksPerThread * threads);
    const size_t whole = plan.tasks.size();
    for (size_t i = 0; i < whole && threads > 1; ++i)
        if (plan.tasks[i].parts > 1 && plan.tasks[i].cost > most) split_task(call, i, plan);
    std::sort(plan.tasks.begin(), plan.tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

}  // namespace
}  // namespace horde
