/* Loops over bytes that numpy makes in several passes, or with the GIL held. Optional: without a compiler forebay does
   the same in numpy, bit for bit (tests/test_native.py compares the two).

   Every function checks sizes before it writes, then releases the GIL. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

enum { IGNORED_LABEL = -100 };

static int failed(const char *reason) {
    PyErr_SetString(PyExc_ValueError, reason);
    return -1;
}

/* Buffers that are released together; an optional one that is None has no memory. */
typedef struct {
    Py_buffer all[8];
    int count;
} Buffers;

static int take(Buffers *buffers, PyObject *object, int flags) {
    if (PyObject_GetBuffer(object, &buffers->all[buffers->count], flags) < 0) return -1;
    buffers->count++;
    return 0;
}

static void release(Buffers *buffers) {
    while (buffers->count) PyBuffer_Release(&buffers->all[--buffers->count]);
}

/* Rows of a shuffled batch are far apart in memory: while one is copied, the beginning of the next one arrives; the CPU
   sees the rest coming. */
enum { LINE = 64, BEGINNING = 512 };

static void prefetch(int64_t address, Py_ssize_t bytes) {
#if defined(__GNUC__)
    for (Py_ssize_t at = 0; at < bytes; at += LINE) __builtin_prefetch((const char *)(intptr_t)address + at);
#endif
}

static void copy_row(char *out, const char *row, Py_ssize_t bytes, int64_t next) {
    if (next) prefetch(next, bytes < BEGINNING ? bytes : BEGINNING);
    memcpy(out, row, (size_t)bytes);
}

/* set_helpers(count)           further threads that take part in the work of calls of this thread; 0 at first
   count_helpers() -> int

   Work has pieces. Its caller and the helpers take one after the other; none of them needs the GIL. A call that is named
   `start_…` returns at once, while helpers begin; `finish` does what is left of it.

       caller    start 1 ─ start 2 ─ finish 1 ▯  ▯ ─ Python ─ start 3 ─ finish 2 …
       helper           ▯   ▯   ▯   ▯   ▯  ▯   ▯   ▯   ▯   ▯    ▯   ▯   ▯

   All works of a process share the helpers, the oldest first. A forked process has none of them, and begins its own. Work
   of one piece is done at once: waking a helper would take longer. */

enum { MOST_HELPERS = 64, SPINS = 4096, IDLE_SECONDS = 10, FAILED_SECONDS = 1 };
static const char WORK[] = "forebay.work";

typedef struct Work {
    int (*run)(struct Work *, Py_ssize_t piece); /* 0: the work fails there, and later pieces are left out */
    void (*release)(struct Work *);              /* with the GIL */
    PyObject *(*result)(struct Work *);
    Py_ssize_t pieces, next, failed; /* failed: the first piece that did, `pieces` if none */
    atomic_int running;
    struct Work *after;
    unsigned process;
    int is_finished;
} Work;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t begun, ended;
    Work *first; /* works that have pieces left, the oldest first */
    int threads;
    unsigned process;
    time_t failed; /* when no thread could be begun */
} helpers = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, 0};

/* Contexts of zstd that nobody uses. With the lock. */
static void *free_contexts[2 * MOST_HELPERS];
static int free_context_count;

static _Thread_local int helpers_of_thread;
static int has_cores; /* more than one */

static void delist(Work *work) {
    for (Work **at = &helpers.first; *at; at = &(*at)->after)
        if (*at == work) {
            *at = work->after;
            return;
        }
}

/* With the lock, which is free meanwhile. */
static void run_piece(Work *work) {
    Py_ssize_t piece = work->next++;
    if (work->next == work->pieces) delist(work);
    atomic_fetch_add(&work->running, 1);
    pthread_mutex_unlock(&helpers.lock);
    int is_sound = work->run(work, piece);
    pthread_mutex_lock(&helpers.lock);
    if (!is_sound) {
        if (piece < work->failed) work->failed = piece;
        if (work->next < work->pieces) delist(work);
        work->next = work->pieces;
    }
    /* From here on the work may be freed. */
    if (atomic_fetch_sub(&work->running, 1) == 1) pthread_cond_broadcast(&helpers.ended);
}

static void *help(void *unused) {
    int is_idle = 0;
    pthread_mutex_lock(&helpers.lock);
    while (helpers.first || !is_idle) { /* one that has had nothing to do for a while ends; `start` begins another */
        struct timespec until = {time(NULL) + IDLE_SECONDS, 0};
        is_idle = 0;
        while (!helpers.first && !is_idle) is_idle = pthread_cond_timedwait(&helpers.begun, &helpers.lock, &until) != 0;
        if (helpers.first) run_piece(helpers.first);
    }
    helpers.threads--;
    pthread_mutex_unlock(&helpers.lock);
    return unused;
}

/* With the lock. Signals belong to the threads of the interpreter, but for those that a thread causes itself. */
static int begin_helper(void) {
    static const int own[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP};
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    for (size_t at = 0; at < sizeof(own) / sizeof(own[0]); at++) sigdelset(&all, own[at]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int is_begun = !pthread_create(&thread, NULL, help, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (is_begun) pthread_detach(thread);
    helpers.threads += is_begun;
    if (!is_begun) helpers.failed = time(NULL);
    return is_begun;
}

static void start(Work *work) {
    pthread_mutex_lock(&helpers.lock);
    if (helpers.threads < helpers_of_thread && (!helpers.failed || time(NULL) > helpers.failed + FAILED_SECONDS))
        while (helpers.threads < helpers_of_thread && begin_helper()) {}
    work->process = helpers.process;
    if (work->pieces) {
        Work **last = &helpers.first;
        while (*last) last = &(*last)->after;
        *last = work;
    }
    pthread_mutex_unlock(&helpers.lock);
    if (helpers_of_thread > 1)
        pthread_cond_broadcast(&helpers.begun);
    else
        pthread_cond_signal(&helpers.begun);
}

/* With the lock. While a helper ends its last piece, there may be later work to do. */
static void wait_for_helpers(Work *work) {
    if (helpers.first) {
        run_piece(helpers.first);
        return;
    }
    pthread_mutex_unlock(&helpers.lock);
    int spins = has_cores ? SPINS : 0; /* on one core the helper would not run meanwhile */
    for (int spin = 0; spin < spins && atomic_load(&work->running); spin++) { /* sleeping would take longer */
#if defined(__x86_64__) && defined(__GNUC__)
        __builtin_ia32_pause();
#endif
    }
    pthread_mutex_lock(&helpers.lock);
    if (atomic_load(&work->running)) pthread_cond_wait(&helpers.ended, &helpers.lock);
}

static void complete(Work *work) {
    pthread_mutex_lock(&helpers.lock);
    if (work->process != helpers.process) { /* the helpers stayed in the parent of this process */
        atomic_store(&work->running, 0);
        work->process = helpers.process, work->next = 0, work->failed = work->pieces;
    }
    while (work->next < work->pieces) run_piece(work);
    while (atomic_load(&work->running)) wait_for_helpers(work);
    pthread_mutex_unlock(&helpers.lock);
    work->is_finished = 1;
}

static int is_shared(const Work *work) { return helpers_of_thread && work->pieces > 1; }

/* Nobody else knows of the work. */
static void run_alone(Work *work) {
    for (Py_ssize_t piece = 0; piece < work->failed; piece++)
        if (!work->run(work, piece)) work->failed = piece;
    work->is_finished = 1;
}

/* Ends work whose pieces are not needed any more, and frees it. */
static void drop(Work *work) {
    if (!work->is_finished) {
        pthread_mutex_lock(&helpers.lock);
        if (work->process == helpers.process) {
            if (work->next < work->pieces) delist(work);
            work->next = work->pieces;
            while (atomic_load(&work->running)) wait_for_helpers(work);
        }
        pthread_mutex_unlock(&helpers.lock);
    }
    work->release(work);
    PyMem_Free(work);
}

/* Does all of the work, and frees it. */
static PyObject *done(Work *work) {
    if (!work) return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_shared(work)) {
        start(work);
        complete(work);
    } else
        run_alone(work);
    Py_END_ALLOW_THREADS
    PyObject *result = work->result(work);
    drop(work);
    return result;
}

static void drop_capsule(PyObject *capsule) { drop(PyCapsule_GetPointer(capsule, WORK)); }

static PyObject *started(Work *work) {
    if (!work) return NULL;
    PyObject *capsule = PyCapsule_New(work, WORK, drop_capsule);
    if (!capsule) {
        drop(work);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    if (is_shared(work))
        start(work);
    else
        run_alone(work); /* nobody would begin it */
    Py_END_ALLOW_THREADS
    return capsule;
}

static PyObject *finish(PyObject *self, PyObject *args) {
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "O", &capsule)) return NULL;
    Work *work = PyCapsule_GetPointer(capsule, WORK);
    if (!work) return NULL;
    if (!work->is_finished) {
        Py_BEGIN_ALLOW_THREADS
        complete(work);
        Py_END_ALLOW_THREADS
    }
    return work->result(work);
}

static PyObject *set_helpers(PyObject *self, PyObject *args) {
    int count;
    if (!PyArg_ParseTuple(args, "i", &count)) return NULL;
    helpers_of_thread = count < 0 ? 0 : count > MOST_HELPERS ? MOST_HELPERS : count;
    return Py_NewRef(Py_None);
}

static PyObject *count_helpers(PyObject *self, PyObject *args) { return PyLong_FromLong(helpers_of_thread); }

/* In a forked process, before anything else of it runs. */
static void forget_helpers(void) {
    const pthread_mutex_t free_lock = PTHREAD_MUTEX_INITIALIZER;
    const pthread_cond_t nobody = PTHREAD_COND_INITIALIZER;
    helpers.lock = free_lock;
    helpers.begun = helpers.ended = nobody;
    helpers.first = NULL;
    helpers.threads = 0;
    helpers.failed = 0;
    free_context_count = 0; /* another thread may just have changed it */
    helpers.process++;
}

/* new_pool(limit) -> pool                                  keeps at most `limit` bytes of free memory
   lend(pool, shape, code, bits) -> capsule                 memory that becomes a tensor
   free_bytes(pool) -> int

   Memory of batches. A capsule is what torch.from_dlpack takes: the tensor's memory comes back when its storage is freed,
   in any thread, with or without the GIL. A return is one atomic push, so that nobody waits, also in a forked process;
   only a thread that has the GIL takes what was returned.

       lend ◀── free ▯▯▯ ◀── returned ▯▯ ◀── push ── a storage is freed
                newest first; what is over the limit is freed, the oldest first

   code and bits are those of a DLDataType. */

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t sides;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor tensor;
    void *context;
    void (*deleter)(struct DLManagedTensor *);
} DLManagedTensor;

enum { DL_CPU = 1, MOST_SIDES = 8, KEPT_BYTES = 16384 }; /* less is as fast from malloc */
static const char POOL[] = "forebay.pool", DL_TENSOR[] = "dltensor";

typedef struct Pool Pool;

typedef struct Block {
    DLManagedTensor managed;
    int64_t shape[MOST_SIDES];
    struct Block *next, *newer;
    Pool *pool; /* NULL: freed, not kept */
    int64_t bytes;
} Block;

struct Pool {
    _Atomic(Block *) returned;
    atomic_size_t holders; /* the capsule of the pool, and memory that is lent */
    Block *newest, *oldest;
    int64_t free_bytes, limit;
};

static void free_list(Block *block) {
    while (block) {
        Block *next = block->next;
        free(block);
        block = next;
    }
}

static void let_go(Pool *pool) {
    if (atomic_fetch_sub(&pool->holders, 1) > 1) return;
    free_list(atomic_load(&pool->returned));
    free_list(pool->newest);
    free(pool);
}

static void take_back(DLManagedTensor *managed) {
    Block *block = managed->context;
    Pool *pool = block->pool;
    if (!pool) {
        free(block);
        return;
    }
    block->next = atomic_load(&pool->returned);
    while (!atomic_compare_exchange_weak(&pool->returned, &block->next, block)) {}
    let_go(pool);
}

static void unlink_block(Pool *pool, Block *block) {
    *(block->newer ? &block->newer->next : &pool->newest) = block->next;
    *(block->next ? &block->next->newer : &pool->oldest) = block->newer;
    pool->free_bytes -= block->bytes;
}

static void collect(Pool *pool) {
    Block *last = NULL, *block = atomic_exchange(&pool->returned, NULL);
    while (block) { /* the stack has the newest on top */
        Block *next = block->next;
        block->next = last;
        last = block;
        block = next;
    }
    while ((block = last)) {
        last = block->next;
        block->newer = NULL;
        block->next = pool->newest;
        *(pool->newest ? &pool->newest->newer : &pool->oldest) = block;
        pool->newest = block;
        pool->free_bytes += block->bytes;
    }
    while (pool->free_bytes > pool->limit && (block = pool->oldest)) {
        unlink_block(pool, block);
        free(block);
    }
}

static Block *block_of(Pool *pool, int64_t bytes) {
    Block *block = bytes < KEPT_BYTES ? NULL : pool->newest;
    while (block && block->bytes != bytes) block = block->next;
    if (block) {
        unlink_block(pool, block);
    } else {
        int64_t before = (int64_t)(sizeof(Block) + LINE - 1) / LINE * LINE;
        void *memory = NULL;
        if (bytes > PY_SSIZE_T_MAX - before || posix_memalign(&memory, LINE, (size_t)(before + bytes))) return NULL;
        block = memory;
        *block = (Block){.bytes = bytes, .pool = bytes < KEPT_BYTES ? NULL : pool};
        block->managed.tensor = (DLTensor){.data = (char *)memory + before, .device = {DL_CPU, 0}, .shape = block->shape};
        block->managed.context = block;
        block->managed.deleter = take_back;
    }
    if (block->pool) atomic_fetch_add(&pool->holders, 1);
    return block;
}

static void drop_unused(PyObject *capsule) { /* torch renames a capsule that it took */
    if (!PyCapsule_IsValid(capsule, DL_TENSOR)) return;
    DLManagedTensor *managed = PyCapsule_GetPointer(capsule, DL_TENSOR);
    managed->deleter(managed);
}

static void drop_pool(PyObject *capsule) { let_go(PyCapsule_GetPointer(capsule, POOL)); }

static PyObject *new_pool(PyObject *self, PyObject *args) {
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "n", &limit)) return NULL;
    Pool *pool = calloc(1, sizeof(Pool));
    if (!pool) return PyErr_NoMemory();
    atomic_init(&pool->returned, NULL);
    atomic_init(&pool->holders, 1);
    pool->limit = limit;
    PyObject *capsule = PyCapsule_New(pool, POOL, drop_pool);
    if (!capsule) free(pool);
    return capsule;
}

static PyObject *lent(Pool *pool, const int64_t *shape, Py_ssize_t sides, uint8_t code, uint8_t bits) {
    int64_t bytes = bits / 8;
    int sound = sides <= MOST_SIDES && bits >= 8;
    for (Py_ssize_t at = 0; sound && at < sides; at++) {
        sound = shape[at] >= 0 && (!shape[at] || bytes <= PY_SSIZE_T_MAX / shape[at]);
        bytes = sound ? bytes * shape[at] : 0;
    }
    if (!sound) {
        failed("a shape must have at most 8 sides, none negative, and fit into memory");
        return NULL;
    }
    Block *block = block_of(pool, bytes);
    if (!block) return PyErr_NoMemory();
    memcpy(block->shape, shape, (size_t)sides * sizeof(int64_t));
    block->managed.tensor.sides = (int32_t)sides;
    block->managed.tensor.dtype.code = code;
    block->managed.tensor.dtype.bits = bits;
    block->managed.tensor.dtype.lanes = 1;
    PyObject *capsule = PyCapsule_New(&block->managed, DL_TENSOR, drop_unused);
    if (!capsule) take_back(&block->managed);
    return capsule;
}

static PyObject *lend(PyObject *self, PyObject *args) {
    PyObject *capsule, *shape;
    unsigned char code, bits;
    int64_t sides[MOST_SIDES] = {0};
    if (!PyArg_ParseTuple(args, "OO!bb", &capsule, &PyTuple_Type, &shape, &code, &bits)) return NULL;
    Pool *pool = PyCapsule_GetPointer(capsule, POOL);
    if (!pool) return NULL;
    Py_ssize_t count = PyTuple_Size(shape);
    for (Py_ssize_t at = 0; at < count && at < MOST_SIDES; at++) {
        sides[at] = PyLong_AsLongLong(PyTuple_GetItem(shape, at));
        if (sides[at] == -1 && PyErr_Occurred()) return NULL;
    }
    collect(pool);
    return lent(pool, sides, count, code, bits);
}

static PyObject *free_bytes(PyObject *self, PyObject *args) {
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "O", &capsule)) return NULL;
    Pool *pool = PyCapsule_GetPointer(capsule, POOL);
    if (!pool) return NULL;
    collect(pool);
    return PyLong_FromLongLong(pool->free_bytes);
}

/* gather(out, addresses, item_bytes)
   start_gathering(the same) -> work

   Copy the item at each address. */

enum { GATHERED = 65536 }; /* bytes of a piece */

typedef struct {
    Work work;
    Buffers buffers;
    Py_ssize_t item, count, step;
} Gathering;

static int gather_piece(Work *work, Py_ssize_t piece) {
    const Gathering *all = (const Gathering *)work;
    const int64_t *addresses = all->buffers.all[1].buf;
    Py_ssize_t stop = all->count - piece * all->step < all->step ? all->count : (piece + 1) * all->step;
    for (Py_ssize_t at = piece * all->step; at < stop; at++)
        copy_row((char *)all->buffers.all[0].buf + at * all->item, (const char *)(intptr_t)addresses[at], all->item,
                 at + 1 < all->count ? addresses[at + 1] : 0);
    return 1;
}

static void release_gathering(Work *work) { release(&((Gathering *)work)->buffers); }

static PyObject *none(Work *work) { return Py_NewRef(Py_None); }

static Work *gathering(PyObject *args) {
    PyObject *out, *addresses;
    Gathering *all = PyMem_Calloc(1, sizeof(Gathering));
    if (!all) return (Work *)PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "OOn", &out, &addresses, &all->item)) goto refused;
    if (take(&all->buffers, out, PyBUF_WRITABLE) < 0 || take(&all->buffers, addresses, PyBUF_SIMPLE) < 0) goto refused;
    all->count = all->buffers.all[1].len / (Py_ssize_t)sizeof(int64_t);
    if (all->item < 0 || (all->item && all->count > PY_SSIZE_T_MAX / all->item) ||
        all->buffers.all[0].len != all->count * all->item) {
        failed("out must hold one item for each address");
        goto refused;
    }
    all->step = all->item < GATHERED ? GATHERED / (all->item ? all->item : 1) : 1;
    all->work.run = gather_piece, all->work.release = release_gathering, all->work.result = none;
    all->work.failed = all->work.pieces = all->count ? (all->count - 1) / all->step + 1 : 0;
    return &all->work;
refused:
    release(&all->buffers);
    PyMem_Free(all);
    return NULL;
}

static PyObject *gather(PyObject *self, PyObject *args) { return done(gathering(args)); }

static PyObject *start_gathering(PyObject *self, PyObject *args) { return started(gathering(args)); }

/* permute(cells, size, highs, lows, keys): replace each cell by where the shuffle of forebay.order.orders puts it.

   cells, keys      uint64; a key for each round */

static const uint64_t HASH_FIRST = 0xBF58476D1CE4E5B9, HASH_SECOND = 0x94D049BB133111EB;

static uint64_t rotated(uint64_t half, uint64_t other, uint64_t key, uint64_t count) {
    uint64_t word = (other ^ key) * HASH_FIRST;
    word = (word ^ word >> 32) * HASH_SECOND;
    half += (word >> 32) * count >> 32;
    return half < count ? half : half - count;
}

static PyObject *permute(PyObject *self, PyObject *args) {
    PyObject *cells_object, *keys_object, *result = NULL;
    unsigned long long size, highs, lows;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OKKKO", &cells_object, &size, &highs, &lows, &keys_object)) return NULL;
    if (take(&buffers, cells_object, PyBUF_WRITABLE) < 0 || take(&buffers, keys_object, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t count = buffers.all[0].len / (Py_ssize_t)sizeof(uint64_t);
    Py_ssize_t rounds = buffers.all[1].len / (Py_ssize_t)sizeof(uint64_t);
    uint64_t *cells = buffers.all[0].buf;
    const uint64_t *keys = buffers.all[1].buf;
    int sound = size && size <= 1ULL << 62 && highs && lows && highs <= 1ULL << 32 && lows <= 1ULL << 32 &&
                highs * lows >= size;
    for (Py_ssize_t at = 0; sound && at < count; at++) sound = cells[at] < size; /* else it would turn for ever */
    if (!sound) {
        failed("cells must be below the size, and highs x lows at least the size");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) {
        uint64_t cell = cells[at];
        do {
            uint64_t high = cell / lows, low = cell % lows;
            for (Py_ssize_t round = 0; round < rounds; round++)
                if (round % 2)
                    low = rotated(low, high, keys[round], lows);
                else
                    high = rotated(high, low, keys[round], highs);
            cell = high * lows + low;
        } while (cell >= size);
        cells[at] = cell;
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* locate_rows(chunks, within, rows, starts) -> bool

   Write the chunk of each row, and the row's number in it. Chunk c has the rows starts[c] to starts[c + 1]; all are
   int64. Returns False, and leaves the outputs unfinished, at the first row that is in no chunk. */

static Py_ssize_t chunk_of(int64_t row, const int64_t *starts, Py_ssize_t chunks) {
    if (row < starts[0] || row >= starts[chunks]) return -1;
    Py_ssize_t low = 0; /* starts[low] <= row < starts[low + left] */
    for (Py_ssize_t left = chunks; left > 1; left -= left / 2) /* no branch: it would be guessed wrong half the time */
        low = starts[low + left / 2] <= row ? low + left / 2 : low;
    return low;
}

static PyObject *locate_rows(PyObject *self, PyObject *args) {
    PyObject *objects[4], *result = NULL;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOO", &objects[0], &objects[1], &objects[2], &objects[3])) return NULL;
    for (int at = 0; at < 4; at++)
        if (take(&buffers, objects[at], at < 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t count = buffers.all[2].len / (Py_ssize_t)sizeof(int64_t);
    Py_ssize_t chunks = buffers.all[3].len / (Py_ssize_t)sizeof(int64_t) - 1;
    if (chunks < 0 || buffers.all[0].len != buffers.all[2].len || buffers.all[1].len != buffers.all[2].len) {
        failed("outputs must have one number for each row, and starts at least one");
        goto end;
    }
    int64_t *found = buffers.all[0].buf, *within = buffers.all[1].buf;
    const int64_t *rows = buffers.all[2].buf, *starts = buffers.all[3].buf;
    Py_ssize_t at = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; at < count; at++) {
        Py_ssize_t chunk = chunk_of(rows[at], starts, chunks);
        if (chunk < 0) break;
        found[at] = chunk;
        within[at] = rows[at] - starts[chunk];
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(at == count);
end:
    release(&buffers);
    return result;
}

/* Tables of one column, with a number for each chunk. A row is read only if all of them agree that it can be.

   bases          int64: the address of the first row, or of the first value of ragged rows; 0 if it is not mapped
   limits         uint64: the offsets in bytes, exclusive, at which a row may start; of ragged rows, the number of values
   item           bytes of a row, or of a value
   first_blocks   int64: the number of the first block of `block_rows` rows, and at the end the number of all blocks
   checked        a bit for every block: whether its checksum was compared */

typedef struct {
    const int64_t *bases, *first_blocks;
    const uint64_t *limits;
    const uint8_t *checked;
    Py_ssize_t chunks, item, block_rows, blocks;
} Mapped;

static int take_mapped(Buffers *buffers, PyObject *tables, Mapped *mapped) {
    PyObject *bases, *limits, *first_blocks, *checked;
    const Py_buffer *taken = &buffers->all[buffers->count];
    if (!PyArg_ParseTuple(tables, "OOnOOn", &bases, &limits, &mapped->item, &first_blocks, &checked, &mapped->block_rows))
        return -1;
    if (take(buffers, bases, PyBUF_SIMPLE) < 0 || take(buffers, limits, PyBUF_SIMPLE) < 0 ||
        take(buffers, first_blocks, PyBUF_SIMPLE) < 0 || take(buffers, checked, PyBUF_SIMPLE) < 0)
        return -1;
    mapped->chunks = taken[0].len / (Py_ssize_t)sizeof(int64_t);
    mapped->blocks = taken[3].len * 8;
    if (mapped->item < 1 || mapped->block_rows < 1 || taken[1].len != taken[0].len ||
        taken[2].len != taken[0].len + (Py_ssize_t)sizeof(int64_t))
        return failed("tables must have one number for each chunk");
    mapped->bases = taken[0].buf, mapped->limits = taken[1].buf;
    mapped->first_blocks = taken[2].buf, mapped->checked = taken[3].buf;
    return 0;
}

/* Another thread may write 0 as it closes a map: a number is loaded once, so that what was checked is what is used. */
static int64_t loaded(const int64_t *numbers, uint64_t at) { return *(const volatile int64_t *)&numbers[at]; }

/* The base of a chunk; 0 if the row must not be read. */
static int64_t readable_base(const Mapped *mapped, uint64_t chunk, uint64_t within) {
    int64_t base = chunk < (uint64_t)mapped->chunks ? loaded(mapped->bases, chunk) : 0;
    if (!base) return 0;
    uint64_t block = (uint64_t)mapped->first_blocks[chunk] + within / (uint64_t)mapped->block_rows;
    int is_checked = block < (uint64_t)mapped->first_blocks[chunk + 1] && block < (uint64_t)mapped->blocks &&
                     mapped->checked[block >> 3] >> (block & 7) & 1;
    return is_checked ? base : 0;
}

/* The address of a row of a fixed size; 0 if it must not be read. */
static int64_t row_address(const Mapped *mapped, uint64_t chunk, uint64_t within) {
    int64_t base = readable_base(mapped, chunk, within);
    if (!base || within > (uint64_t)INT64_MAX / (uint64_t)mapped->item) return 0;
    if (within * (uint64_t)mapped->item >= mapped->limits[chunk]) return 0;
    return (int64_t)((uint64_t)base + within * (uint64_t)mapped->item);
}

/* read_rows(out, rows, starts, tables) -> bool: copy rows of a fixed size by their numbers; starts as for locate_rows.
   Returns False, and leaves `out` unfinished, at the first row that is in no chunk or must not be read. */

static int64_t numbered_address(const Mapped *mapped, int64_t row, const int64_t *starts) {
    Py_ssize_t chunk = chunk_of(row, starts, mapped->chunks);
    return chunk < 0 ? 0 : row_address(mapped, (uint64_t)chunk, (uint64_t)(row - starts[chunk]));
}

static PyObject *read_rows(PyObject *self, PyObject *args) {
    PyObject *objects[3], *tables, *result = NULL;
    Mapped mapped;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOO", &objects[0], &objects[1], &objects[2], &tables)) return NULL;
    for (int at = 0; at < 3; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    if (take_mapped(&buffers, tables, &mapped) < 0) goto end;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(int64_t), at = 0;
    if (count > PY_SSIZE_T_MAX / mapped.item || buffers.all[0].len != count * mapped.item ||
        buffers.all[2].len != (mapped.chunks + 1) * (Py_ssize_t)sizeof(int64_t)) {
        failed("out must hold one item for each row, and starts one number for each chunk");
        goto end;
    }
    char *out = buffers.all[0].buf;
    const int64_t *rows = buffers.all[1].buf, *starts = buffers.all[2].buf;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t now = count ? numbered_address(&mapped, rows[0], starts) : 0, next = 0; at < count && now; at++) {
        next = at + 1 < count ? numbered_address(&mapped, rows[at + 1], starts) : 0;
        copy_row(out + at * mapped.item, (const char *)(intptr_t)now, mapped.item, next);
        now = next;
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(at == count);
end:
    release(&buffers);
    return result;
}

/* fixed_addresses(addresses, chunks, within, tables) -> bool
   ragged_addresses(addresses, chunks, within, tables, counts, edges, edge_limits) -> bool

   Write where rows are, and how many values ragged ones have: edges are the addresses of each chunk's offsets, int64,
   edge_limits the offsets in bytes, exclusive, at which a pair of them may start. All but the tables have a number for
   each row. Returns False, and leaves the outputs unfinished, at the first row that must not be read. */

static int ragged_row(const Mapped *mapped, uint64_t chunk, uint64_t within, const int64_t *edges, const uint64_t *limits,
                      int64_t *address, int64_t *count) {
    int64_t pair[2], base = readable_base(mapped, chunk, within), edge = base ? loaded(edges, chunk) : 0;
    if (!edge || within > (uint64_t)INT64_MAX / sizeof(int64_t)) return 0;
    if (within * sizeof(int64_t) >= limits[chunk]) return 0;
    memcpy(pair, (const char *)(intptr_t)edge + within * sizeof(int64_t), sizeof(pair));
    if (pair[0] < 0 || pair[0] > pair[1] || (uint64_t)pair[1] > mapped->limits[chunk]) return 0;
    *address = base + pair[0] * mapped->item;
    *count = pair[1] - pair[0];
    return 1;
}

static PyObject *addresses_of(PyObject *args, int is_ragged) {
    enum { ADDRESSES, CHUNKS, WITHIN, COUNTS, EDGES, EDGE_LIMITS, OBJECTS, EDGES_AHEAD = 8 };
    PyObject *objects[OBJECTS], *tables, *result = NULL;
    Mapped mapped;
    Buffers rows = {.count = 0}, columns = {.count = 0};
    if (!(is_ragged ? PyArg_ParseTuple(args, "OOOOOOO", &objects[ADDRESSES], &objects[CHUNKS], &objects[WITHIN], &tables,
                                       &objects[COUNTS], &objects[EDGES], &objects[EDGE_LIMITS])
                    : PyArg_ParseTuple(args, "OOOO", &objects[ADDRESSES], &objects[CHUNKS], &objects[WITHIN], &tables)))
        return NULL;
    for (int at = 0; at < (is_ragged ? OBJECTS : COUNTS); at++)
        if (take(&rows, objects[at], at == ADDRESSES || at == COUNTS ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) goto end;
    if (take_mapped(&columns, tables, &mapped) < 0) goto end;
    Py_ssize_t bytes = rows.all[ADDRESSES].len, count = bytes / (Py_ssize_t)sizeof(int64_t), at = 0;
    Py_ssize_t table_bytes = mapped.chunks * (Py_ssize_t)sizeof(int64_t);
    if (rows.all[CHUNKS].len != bytes || rows.all[WITHIN].len != bytes ||
        (is_ragged && (rows.all[COUNTS].len != bytes || rows.all[EDGES].len != table_bytes ||
                       rows.all[EDGE_LIMITS].len != table_bytes))) {
        failed("outputs must have one number for each row, and tables one for each chunk");
        goto end;
    }
    int64_t *addresses = rows.all[ADDRESSES].buf, *counts = is_ragged ? rows.all[COUNTS].buf : NULL;
    const uint64_t *chunks = rows.all[CHUNKS].buf, *within = rows.all[WITHIN].buf;
    Py_BEGIN_ALLOW_THREADS
    for (; at < count; at++) {
        if (is_ragged) {
            if (at + EDGES_AHEAD < count && chunks[at + EDGES_AHEAD] < (uint64_t)mapped.chunks)
                prefetch((int64_t)(((uint64_t *)rows.all[EDGES].buf)[chunks[at + EDGES_AHEAD]] +
                                   within[at + EDGES_AHEAD] * sizeof(int64_t)),
                         LINE);
            if (!ragged_row(&mapped, chunks[at], within[at], rows.all[EDGES].buf, rows.all[EDGE_LIMITS].buf,
                            &addresses[at], &counts[at]))
                break;
        } else if (!(addresses[at] = row_address(&mapped, chunks[at], within[at])))
            break;
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(at == count);
end:
    release(&columns);
    release(&rows);
    return result;
}

static PyObject *fixed_addresses(PyObject *self, PyObject *args) { return addresses_of(args, 0); }

static PyObject *ragged_addresses(PyObject *self, PyObject *args) { return addresses_of(args, 1); }

/* decoded_addresses(addresses, chunks, within, blocks, table, clock, item, ragged) -> int or None

   Write where rows are in decoded blocks; 0 where the table has no block of a row. Returns how many those are; None, with
   the outputs unfinished, at the first row that is outside of its block or whose offsets are not mapped.

   blocks     first_blocks and block_rows as for the tables of a column, and the number of its first block in the table
   table      int64: numbers and places, of a power of two, at the lowest bits of a number; facts, three for each place:
              address, index of the first value, number of values; used, the clock when a block was last used;
              uint8: seen, set to 1 for each place that rows are in
   ragged     None, or counts, edges and edge_limits as for ragged_addresses */

typedef struct {
    const int64_t *first_blocks, *numbers, *places, *facts;
    int64_t *used;
    uint8_t *seen;
    Py_ssize_t chunks, block_rows, number, size, slots, item, clock;
} Decoded;

static int take_decoded(Buffers *buffers, PyObject *blocks, PyObject *table, Decoded *decoded) {
    PyObject *objects[6];
    if (!PyArg_ParseTuple(blocks, "Onn", &objects[0], &decoded->block_rows, &decoded->number) ||
        !PyArg_ParseTuple(table, "OOOOO", &objects[1], &objects[2], &objects[3], &objects[4], &objects[5]))
        return -1;
    for (int at = 0; at < 6; at++)
        if (take(buffers, objects[at], at < 4 ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) return -1;
    const Py_buffer *taken = buffers->all;
    const Py_ssize_t number = (Py_ssize_t)sizeof(int64_t);
    decoded->chunks = taken[0].len / number - 1, decoded->size = taken[1].len / number;
    decoded->slots = taken[4].len / number;
    if (decoded->chunks < 0 || decoded->block_rows < 1 || decoded->size < 1 || decoded->size & (decoded->size - 1) ||
        taken[2].len != taken[1].len || taken[3].len != 3 * taken[4].len || taken[5].len != decoded->slots)
        return failed("tables must have a power of two of numbers, and the same places");
    decoded->first_blocks = taken[0].buf, decoded->numbers = taken[1].buf, decoded->places = taken[2].buf;
    decoded->facts = taken[3].buf, decoded->used = taken[4].buf, decoded->seen = taken[5].buf;
    return 0;
}

/* The place of the block of a row; -1 if it is not in the table, -2 if there is no such row. */
static Py_ssize_t place_of(const Decoded *decoded, uint64_t chunk, uint64_t within) {
    if (chunk >= (uint64_t)decoded->chunks) return -2;
    uint64_t block = (uint64_t)decoded->first_blocks[chunk] + within / (uint64_t)decoded->block_rows;
    if (block >= (uint64_t)decoded->first_blocks[chunk + 1]) return -2;
    uint64_t number = block + (uint64_t)decoded->number, at = number & (uint64_t)(decoded->size - 1);
    if ((uint64_t)decoded->numbers[at] != number || (uint64_t)decoded->places[at] >= (uint64_t)decoded->slots) return -1;
    return (Py_ssize_t)decoded->places[at];
}

/* Whether items `start` to `stop` of a chunk are in a block; writes the address of the first. */
static int address_in_block(const int64_t *facts, Py_ssize_t item, int64_t start, int64_t stop, int64_t *address) {
    uint64_t low = (uint64_t)start - (uint64_t)facts[1], high = (uint64_t)stop - (uint64_t)facts[1];
    if (low > high || high > (uint64_t)facts[2]) return 0;
    *address = facts[0] + (int64_t)low * item;
    return 1;
}

static PyObject *decoded_addresses(PyObject *self, PyObject *args) {
    enum { ADDRESSES, CHUNKS, WITHIN, COUNTS, EDGES, EDGE_LIMITS, OBJECTS };
    PyObject *objects[OBJECTS], *blocks, *table, *ragged, *result = NULL;
    Decoded decoded;
    Buffers rows = {.count = 0}, columns = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOOOnnO", &objects[ADDRESSES], &objects[CHUNKS], &objects[WITHIN], &blocks, &table,
                          &decoded.clock, &decoded.item, &ragged))
        return NULL;
    int is_ragged = !Py_IsNone(ragged);
    if (is_ragged && !PyArg_ParseTuple(ragged, "OOO", &objects[COUNTS], &objects[EDGES], &objects[EDGE_LIMITS]))
        return NULL;
    for (int at = 0; at < (is_ragged ? OBJECTS : COUNTS); at++)
        if (take(&rows, objects[at], at == ADDRESSES || at == COUNTS ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) goto end;
    if (take_decoded(&columns, blocks, table, &decoded) < 0) goto end;
    Py_ssize_t bytes = rows.all[ADDRESSES].len, count = bytes / (Py_ssize_t)sizeof(int64_t), at = 0, missing = 0;
    Py_ssize_t chunk_bytes = decoded.chunks * (Py_ssize_t)sizeof(int64_t);
    if (rows.all[CHUNKS].len != bytes || rows.all[WITHIN].len != bytes ||
        (is_ragged && (rows.all[COUNTS].len != bytes || rows.all[EDGES].len != chunk_bytes ||
                       rows.all[EDGE_LIMITS].len != chunk_bytes))) {
        failed("outputs must have one number for each row, and tables one for each chunk");
        goto end;
    }
    int64_t *addresses = rows.all[ADDRESSES].buf, *counts = is_ragged ? rows.all[COUNTS].buf : NULL;
    const uint64_t *chunks = rows.all[CHUNKS].buf, *within = rows.all[WITHIN].buf;
    Py_BEGIN_ALLOW_THREADS
    for (; at < count; at++) {
        Py_ssize_t place = place_of(&decoded, chunks[at], within[at]);
        int64_t pair[2] = {(int64_t)within[at], (int64_t)(within[at] + 1)};
        if (place == -2) break;
        if (place < 0) {
            addresses[at] = 0;
            missing++;
            continue;
        }
        if (is_ragged) {
            int64_t edge = loaded(rows.all[EDGES].buf, chunks[at]);
            if (!edge || within[at] > (uint64_t)INT64_MAX / sizeof(int64_t) ||
                within[at] * sizeof(int64_t) >= ((uint64_t *)rows.all[EDGE_LIMITS].buf)[chunks[at]])
                break;
            memcpy(pair, (const char *)(intptr_t)edge + within[at] * sizeof(int64_t), sizeof(pair));
            counts[at] = (int64_t)((uint64_t)pair[1] - (uint64_t)pair[0]); /* of a file that may have changed */
        }
        if (!address_in_block(decoded.facts + 3 * place, decoded.item, pair[0], pair[1], &addresses[at])) break;
        decoded.used[place] = decoded.clock + at;
        decoded.seen[place] = 1;
    }
    Py_END_ALLOW_THREADS
    result = at == count ? PyLong_FromSsize_t(missing) : Py_NewRef(Py_None);
end:
    release(&columns);
    release(&rows);
    return result;
}

/* can_decode() -> bool         whether the system has libzstd; else blocks are decoded by Python's zstandard
<<<<<<< HEAD
   start_decoding(frames, outs) -> work
=======
   zstd_version() -> str        of that library; empty where there is none
   start_decoding(addresses, sizes, outs) -> work
>>>>>>> left15

   Decode zstd frames, one piece of work each: helpers need no GIL for it. `finish` returns how many were decoded up to
   the first that is damaged, does not fill its output exactly, is followed by anything, or has a format before that of
   zstd 0.8: libraries of systems decode those by code that nobody looks after.

   frames, outs     lists of buffers; those of outs are writable */

typedef struct {
    void *(*create)(void);
    size_t (*decode)(void *context, void *out, size_t room, const void *frame, size_t size);
    unsigned long long (*content)(const void *frame, size_t size);
    size_t (*stored)(const void *frame, size_t size);
    size_t (*forget)(void *context);
    const char *(*version)(void);
} Zstd;

static Zstd zstd;
static const unsigned char MAGIC[] = {0x28, 0xB5, 0x2F, 0xFD};

static int load_zstd(void) {
    static int was_tried;
    static const char *const names[] = {"libzstd.so.1", "libzstd.1.dylib"};
    for (size_t at = 0; !was_tried && at < sizeof(names) / sizeof(names[0]); at++) {
        void *library = dlopen(names[at], RTLD_NOW | RTLD_LOCAL);
        Zstd found;
        if (!library) continue;
        *(void **)&found.create = dlsym(library, "ZSTD_createDCtx");
        *(void **)&found.decode = dlsym(library, "ZSTD_decompressDCtx");
        *(void **)&found.content = dlsym(library, "ZSTD_getFrameContentSize");
        *(void **)&found.stored = dlsym(library, "ZSTD_findFrameCompressedSize");
        *(void **)&found.forget = dlsym(library, "ZSTD_freeDCtx");
        *(void **)&found.version = dlsym(library, "ZSTD_versionString");
        if (found.create && found.decode && found.content && found.stored && found.forget && found.version) zstd = found;
    }
    was_tried = 1;
    return zstd.create != NULL;
}

static PyObject *can_decode(PyObject *self, PyObject *args) { return PyBool_FromLong(load_zstd()); }

static PyObject *zstd_version(PyObject *self, PyObject *args) {
    return PyUnicode_FromString(load_zstd() ? zstd.version() : "");
}

typedef struct {
    Work work;
    Py_buffer *buffers; /* the frames, then the outputs */
    Py_ssize_t taken;
} Decoding;

static int decode_piece(Work *work, Py_ssize_t piece) {
    const Decoding *all = (const Decoding *)work;
    const Py_buffer *stored = &all->buffers[piece], *out = stored + work->pieces;
    const void *frame = stored->buf;
    size_t size = (size_t)stored->len;
    if (size < sizeof(MAGIC) || memcmp(frame, MAGIC, sizeof(MAGIC)) || zstd.stored(frame, size) != size) return 0;
    if (zstd.content(frame, size) != (unsigned long long)out->len) return 0;
    pthread_mutex_lock(&helpers.lock);
    void *context = free_context_count ? free_contexts[--free_context_count] : NULL;
    pthread_mutex_unlock(&helpers.lock);
    if (!context && !(context = zstd.create())) return 0;
    size_t written = zstd.decode(context, out->buf, (size_t)out->len, frame, size); /* an error is larger than any size */
    pthread_mutex_lock(&helpers.lock);
    if (free_context_count < 2 * MOST_HELPERS) free_contexts[free_context_count++] = context, context = NULL;
    pthread_mutex_unlock(&helpers.lock);
    if (context) zstd.forget(context);
    return written == (size_t)out->len;
}

static void release_decoding(Work *work) {
    Decoding *all = (Decoding *)work;
    while (all->taken) PyBuffer_Release(&all->buffers[--all->taken]);
    PyMem_Free(all->buffers);
}

static PyObject *decoded_count(Work *work) { return PyLong_FromSsize_t(work->failed); }

static int take_decoding(Decoding *all, PyObject *args) {
    PyObject *frames, *outs;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &frames, &PyList_Type, &outs)) return -1;
    Py_ssize_t count = PyList_Size(outs);
    if (PyList_Size(frames) != count || !load_zstd()) return failed("each frame needs an output, and the system libzstd");
    all->buffers = PyMem_Calloc(2 * (size_t)count + 1, sizeof(Py_buffer));
    if (!all->buffers) {
        PyErr_NoMemory();
        return -1;
    }
    for (; all->taken < 2 * count; all->taken++) {
        int is_out = all->taken >= count;
        PyObject *buffer = PyList_GetItem(is_out ? outs : frames, all->taken - (is_out ? count : 0));
        if (!buffer || PyObject_GetBuffer(buffer, &all->buffers[all->taken], is_out ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            return -1;
    }
    all->work.failed = all->work.pieces = count;
    return 0;
}

static PyObject *start_decoding(PyObject *self, PyObject *args) {
    Decoding *all = PyMem_Calloc(1, sizeof(Decoding));
    if (!all) return PyErr_NoMemory();
    if (take_decoding(all, args) < 0) {
        release_decoding(&all->work);
        PyMem_Free(all);
        return NULL;
    }
    all->work.run = decode_piece, all->work.release = release_decoding, all->work.result = decoded_count;
    return started(&all->work);
}

/* pack_rows(tokens_at, token_bytes, width, lengths_at, counts, shifted, size, batches) -> int
   start_packing(the same) -> work

   Write batches of `size` packed rows, each read once from where it is: `width` tokens, and the lengths of its documents.

   tokens_at    int64 [rows]: addresses of the tokens of each row, of 2 or 4 bytes
   lengths_at   int64 [rows]: addresses of the lengths of each row, of 4 bytes; counts, int64 [rows]: how many they are
   batches      a list of tuples of arrays, or of what `lend` lent, for the rows of one batch; the last one may have
                fewer rows:
       stored       the tokens as they are, or None
       wide         int64 [rows, width], or None
       seq_lens     int32 [rows, documents]: the lengths, filled up with 0
       labels, positions    as wide

       tokens       5 6 7 8 9 0 0     lengths 3 2; the rest of a row is padding
       positions    0 1 2 0 1 0 1
       shifted      6 7 . 9 . . .     . = -100
       unshifted    . 6 7 . 9 . .

   Rows behind those of the last batch are left alone. Returns how many batches were written: it ends at one with a row
   whose documents are longer than the row, or whose tokens are not aligned. */

static FAST void widen_16(int64_t *out, const uint16_t *tokens, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = tokens[at];
}

static FAST void widen_32(int64_t *out, const uint32_t *tokens, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = tokens[at];
}

static FAST void count_up(int64_t *out, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = at;
}

static FAST void ignore(int64_t *out, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = IGNORED_LABEL;
}

static void widen(int64_t *out, const char *tokens, Py_ssize_t token_bytes, Py_ssize_t count) {
    if (token_bytes == 2)
        widen_16(out, (const uint16_t *)tokens, count);
    else
        widen_32(out, (const uint32_t *)tokens, count);
}

/* Copies the lengths, so that what was checked is what is used: another process may change a mapped file. */
static int copy_lengths(int32_t *lengths, Py_ssize_t documents, int64_t address, int64_t count, int64_t width) {
    memcpy(lengths, (const void *)(intptr_t)address, (size_t)count * sizeof(int32_t));
    memset(lengths + count, 0, (size_t)(documents - count) * sizeof(int32_t));
    int64_t total = 0;
    for (int64_t at = 0; at < count; at++) {
        if (lengths[at] < 0) return 0;
        total += lengths[at];
    }
    return total <= width;
}

/* Labels of tokens that have one already are -100 where a document ends or begins, and in the padding. */
static void cut_labels(int64_t *labels, Py_ssize_t width, const int32_t *lengths, Py_ssize_t documents, int shifted) {
    Py_ssize_t stop = 0;
    for (Py_ssize_t at = 0; at < documents; at++) {
        if (!lengths[at]) continue;
        if (!shifted) labels[stop] = IGNORED_LABEL;
        stop += lengths[at];
        if (shifted) labels[stop - 1] = IGNORED_LABEL;
    }
    ignore(labels + stop, width - stop);
}

static void position_row(int64_t *positions, Py_ssize_t width, const int32_t *lengths, Py_ssize_t documents) {
    Py_ssize_t stop = 0;
    for (Py_ssize_t at = 0; at < documents; at++) {
        count_up(positions + stop, lengths[at]);
        stop += lengths[at];
    }
    count_up(positions + stop, width - stop);
}

enum { STORED, WIDE, SEQ_LENS, LABELS, POSITIONS, ARRAYS };
enum { PIECE = 256, MOST_AHEAD = 16384 }; /* bytes */
enum { PACKED_ROWS = 8 };                 /* rows that a thread takes at once */

typedef struct {
    Buffers buffers;
    char *memory[ARRAYS];
    Py_ssize_t rows, documents;
} PackedBatch;

typedef struct {
    const int64_t *tokens_at, *lengths_at, *counts;
    Py_ssize_t token_bytes, width, rows, size;
    int shifted;
} PackedRows;

/* lend_packed(pool, counts, size, documents, width, token_bytes, labels, positions) -> list

   Memory for `pack_rows`: a tuple for each `size` rows. counts has the number of documents of each row; `documents` is
   the width of seq_lens, 0 for that of the row with the most. The list ends before a batch that has more of them.
   Tokens are as stored if `token_bytes` is not 0. */

static PyObject *lent_batch(Pool *pool, const int64_t *rows_width, int64_t documents, Py_ssize_t token_bytes,
                            const int *wanted) {
    enum { INT = 0, UNSIGNED = 1 };
    const int64_t lengths[] = {rows_width[0], documents};
    PyObject *batch = PyTuple_New(ARRAYS);
    for (int at = 0; batch && at < ARRAYS; at++) {
        PyObject *one = !wanted[at]        ? Py_NewRef(Py_None)
                        : at == SEQ_LENS   ? lent(pool, lengths, 2, INT, 32)
                        : at == STORED     ? lent(pool, rows_width, 2, UNSIGNED, (uint8_t)(8 * token_bytes))
                                           : lent(pool, rows_width, 2, INT, 64);
        if (!one) {
            Py_DECREF(batch);
            return NULL;
        }
        PyTuple_SetItem(batch, at, one);
    }
    return batch;
}

static PyObject *lend_packed(PyObject *self, PyObject *args) {
    PyObject *capsule, *counts_object, *batches = NULL;
    Py_ssize_t size, documents, width, token_bytes;
    int labels, positions;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOnnnnpp", &capsule, &counts_object, &size, &documents, &width, &token_bytes, &labels,
                          &positions))
        return NULL;
    Pool *pool = PyCapsule_GetPointer(capsule, POOL);
    if (!pool || take(&buffers, counts_object, PyBUF_SIMPLE) < 0) return NULL;
    const int wanted[ARRAYS] = {token_bytes != 0, token_bytes == 0, 1, labels, positions};
    const int64_t *counts = buffers.all[0].buf;
    Py_ssize_t rows = buffers.all[0].len / (Py_ssize_t)sizeof(int64_t), first = 0;
    if (size < 1 || token_bytes < 0 || token_bytes > 4) {
        failed("batches must have rows, and tokens at most 4 bytes");
        goto end;
    }
    collect(pool);
    batches = PyList_New(0);
    while (batches) {
        int64_t most = 1, shape[] = {rows - first < size ? rows - first : size, width};
        for (Py_ssize_t row = first; row < first + shape[0]; row++) most = counts[row] > most ? counts[row] : most;
        if (documents && most > documents) break;
        PyObject *batch = lent_batch(pool, shape, documents ? documents : most, token_bytes, wanted);
        if (!batch || PyList_Append(batches, batch) < 0) {
            Py_DECREF(batches);
            batches = NULL;
        }
        Py_XDECREF(batch);
        first += size;
        if (first >= rows) break;
    }
end:
    release(&buffers);
    return batches;
}

/* Memory that was lent, which the list of batches holds meanwhile, or that of an array; returns its bytes. */
static Py_ssize_t take_memory(PackedBatch *batch, int at, PyObject *array) {
    if (PyCapsule_IsValid(array, DL_TENSOR)) {
        const DLManagedTensor *managed = PyCapsule_GetPointer(array, DL_TENSOR);
        if (managed->deleter != take_back) return failed("memory must come from `lend`");
        batch->memory[at] = managed->tensor.data;
        return (Py_ssize_t)((const Block *)managed->context)->bytes;
    }
    if (take(&batch->buffers, array, PyBUF_WRITABLE) < 0) return -1;
    const Py_buffer *taken = &batch->buffers.all[batch->buffers.count - 1];
    batch->memory[at] = taken->buf;
    return taken->len;
}

/* The arrays of one batch, if they have the sizes that its rows need. */
static int take_batch(PackedBatch *batch, PyObject *arrays, const PackedRows *packed, Py_ssize_t first) {
    batch->rows = packed->rows - first < packed->size ? packed->rows - first : packed->size;
    if (!PyTuple_Check(arrays) || PyTuple_Size(arrays) != ARRAYS) return failed("a batch must be a tuple of 5 arrays");
    for (int at = 0; at < ARRAYS; at++) {
        PyObject *array = PyTuple_GetItem(arrays, at);
        if (at != SEQ_LENS && Py_IsNone(array)) continue;
        Py_ssize_t held = take_memory(batch, at, array);
        if (held < 0) return -1;
        Py_ssize_t bytes = packed->width * (at == STORED ? packed->token_bytes : (Py_ssize_t)sizeof(int64_t));
        if (at != SEQ_LENS && (batch->rows > PY_SSIZE_T_MAX / bytes || held != batch->rows * bytes))
            return failed("outputs must be int64 [rows, width]");
        if (at != SEQ_LENS) continue;
        batch->documents = batch->rows ? held / (Py_ssize_t)sizeof(int32_t) / batch->rows : 0;
        if (held != batch->rows * batch->documents * (Py_ssize_t)sizeof(int32_t))
            return failed("seq_lens must be int32 [rows, documents]");
    }
    for (Py_ssize_t row = first; row < first + batch->rows; row++)
        if (packed->counts[row] < 0 || packed->counts[row] > batch->documents)
            return failed("seq_lens must hold the lengths of each row");
    return 0;
}

/* Tokens, and labels that are not cut yet; meanwhile the next row arrives from memory, piece by piece, since a CPU waits
   for few lines at once. */
static void token_row(const PackedBatch *batch, Py_ssize_t row, const PackedRows *packed, const char *tokens,
                      int64_t next) {
    Py_ssize_t item = packed->token_bytes, width = packed->width, step = PIECE / item;
    char *stored = batch->memory[STORED] ? batch->memory[STORED] + row * width * item : NULL;
    int64_t *wide = batch->memory[WIDE] ? (int64_t *)batch->memory[WIDE] + row * width : NULL;
    int64_t *labels = batch->memory[LABELS] ? (int64_t *)batch->memory[LABELS] + row * width : NULL;
    if (stored) copy_row(stored, tokens, width * item, next);
    for (Py_ssize_t at = 0; at < width && (wide || labels); at += step) {
        Py_ssize_t count = width - at < step ? width - at : step, last = at + count == width;
        const char *piece = tokens + at * item;
        if (next && at * item < MOST_AHEAD) prefetch(next + at * item, count * item);
        if (wide) widen(wide + at, piece, item, count);
        if (labels && packed->shifted)
            widen(labels + at, piece + item, item, count - last);
        else if (labels)
            widen(labels + at, piece, item, count);
    }
}

/* Some rows of a batch whose first row is number `first`. */
static int pack_part(const PackedBatch *batch, const PackedRows *packed, Py_ssize_t first, Py_ssize_t begin,
                     Py_ssize_t end) {
    for (Py_ssize_t row = begin; row < end; row++) {
        Py_ssize_t at = first + row, next = at + 1 < packed->rows ? at + 1 : 0;
        int32_t *lengths = (int32_t *)batch->memory[SEQ_LENS] + row * batch->documents;
        int64_t *labels = (int64_t *)batch->memory[LABELS], *positions = (int64_t *)batch->memory[POSITIONS];
        if ((uint64_t)packed->tokens_at[at] % (uint64_t)packed->token_bytes) return 0; /* a file may begin anywhere */
        int fits = copy_lengths(lengths, batch->documents, packed->lengths_at[at], packed->counts[at], packed->width);
        if (!fits && (labels || positions)) return 0;
        if (next) prefetch(packed->lengths_at[next], LINE);
        token_row(batch, row, packed, (const char *)(intptr_t)packed->tokens_at[at], next ? packed->tokens_at[next] : 0);
        if (labels) cut_labels(labels + row * packed->width, packed->width, lengths, batch->documents, packed->shifted);
        if (positions) position_row(positions + row * packed->width, packed->width, lengths, batch->documents);
    }
    return 1;
}

typedef struct {
    Work work;
    Buffers buffers;
    PackedRows packed;
    PyObject *arrays; /* holds memory that was lent */
    PackedBatch *batches;
    Py_ssize_t count, pieces; /* batches, and pieces of each */
} Packing;

static int pack_piece(Work *work, Py_ssize_t piece) {
    const Packing *all = (const Packing *)work;
    Py_ssize_t number = piece / all->pieces, begin = piece % all->pieces * PACKED_ROWS, end = begin + PACKED_ROWS;
    const PackedBatch *batch = &all->batches[number];
    return pack_part(batch, &all->packed, number * all->packed.size, begin, end < batch->rows ? end : batch->rows);
}

static void release_packing(Work *work) {
    Packing *all = (Packing *)work;
    for (Py_ssize_t at = 0; at < all->count; at++) release(&all->batches[at].buffers);
    PyMem_Free(all->batches);
    Py_XDECREF(all->arrays);
    release(&all->buffers);
}

static PyObject *written(Work *work) {
    const Packing *all = (const Packing *)work;
    return PyLong_FromSsize_t(work->failed < work->pieces ? work->failed / all->pieces : all->count);
}

static int take_packing(Packing *all, PyObject *args) {
    PyObject *objects[3], *list;
    PackedRows *packed = &all->packed;
    if (!PyArg_ParseTuple(args, "OnnOOpnO!", &objects[0], &packed->token_bytes, &packed->width, &objects[1], &objects[2],
                          &packed->shifted, &packed->size, &PyList_Type, &list))
        return -1;
    for (int at = 0; at < 3; at++)
        if (take(&all->buffers, objects[at], PyBUF_SIMPLE) < 0) return -1;
    const Py_buffer *taken = all->buffers.all;
    packed->tokens_at = taken[0].buf, packed->lengths_at = taken[1].buf, packed->counts = taken[2].buf;
    packed->rows = taken[0].len / (Py_ssize_t)sizeof(int64_t);
    if ((packed->token_bytes != 2 && packed->token_bytes != 4) || packed->width < 1 || packed->width > INT32_MAX)
        return failed("tokens must have 2 or 4 bytes, and rows at least one token");
    if (taken[1].len != taken[0].len || taken[2].len != taken[0].len)
        return failed("tokens and lengths must have the same rows");
    Py_ssize_t count = PyList_Size(list);
    if (packed->size < 1 || count > (packed->rows ? (packed->rows - 1) / packed->size + 1 : 1))
        return failed("batches must have `size` rows each, the last one the rest");
    all->arrays = PyList_AsTuple(list);
    all->batches = PyMem_Calloc((size_t)count, sizeof(PackedBatch));
    if (!all->arrays || !all->batches) {
        PyErr_NoMemory();
        return -1;
    }
    for (; all->count < count; all->count++)
        if (take_batch(&all->batches[all->count], PyTuple_GetItem(all->arrays, all->count), packed,
                       all->count * packed->size) < 0) {
            all->count++; /* some of its arrays were taken */
            return -1;
        }
    all->pieces = (packed->size - 1) / PACKED_ROWS + 1;
    if (packed->rows < packed->size) all->pieces = packed->rows ? (packed->rows - 1) / PACKED_ROWS + 1 : 1;
    return 0;
}

static Work *packing(PyObject *args) {
    Packing *all = PyMem_Calloc(1, sizeof(Packing));
    if (!all) return (Work *)PyErr_NoMemory();
    if (take_packing(all, args) < 0) {
        release_packing(&all->work);
        PyMem_Free(all);
        return NULL;
    }
    all->work.run = pack_piece, all->work.release = release_packing, all->work.result = written;
    all->work.failed = all->work.pieces = all->count * all->pieces;
    return &all->work;
}

static PyObject *pack_rows(PyObject *self, PyObject *args) { return done(packing(args)); }

static PyObject *start_packing(PyObject *self, PyObject *args) { return started(packing(args)); }

/* mirror(out, content, width): lines of `width` bytes, each reversed. */

static FAST void reverse(uint8_t *out, const uint8_t *line, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = line[count - 1 - at];
}

static PyObject *mirror(PyObject *self, PyObject *args) {
    PyObject *out_object, *content_object, *result = NULL;
    Py_ssize_t width;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOn", &out_object, &content_object, &width)) return NULL;
    if (take(&buffers, out_object, PyBUF_WRITABLE) < 0 || take(&buffers, content_object, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t bytes = buffers.all[1].len;
    if (width < 1 || bytes % width || buffers.all[0].len != bytes) {
        failed("out and content must have lines of the same width");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < bytes; at += width)
        reverse((uint8_t *)buffers.all[0].buf + at, (const uint8_t *)buffers.all[1].buf + at, width);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* start_painting(canvas, size, content, box, pad, streamed) -> work
   start_painting_scaled(canvas, size, content, box, pad, scale, shift) -> work

   Paint content [3, lines, columns] in its box on a canvas [3, height, width]; scaled is float32, value * scale + shift.
   What is streamed goes past the caches; scaled values were painted more slowly so. */

typedef struct {
    Py_ssize_t height, width, left, top, columns, lines;
} Placement;

static int placed(const Placement *at, Py_ssize_t canvas_values, Py_ssize_t content_bytes) {
    if (at->height < 0 || at->width < 0 || at->left < 0 || at->top < 0 || at->columns < 0 || at->lines < 0 ||
        at->height > 65536 || at->width > 65536 || at->columns > at->width - at->left ||
        at->lines > at->height - at->top)
        return failed("the box is outside the canvas");
    if (canvas_values != 3 * at->height * at->width || content_bytes != 3 * at->lines * at->columns)
        return failed("canvas and content must have the sizes that are passed");
    return 0;
}

typedef struct {
    Work work;
    Buffers buffers;
    Placement at;
    uint8_t pad[3];
    float float_pad[3], scale[3], shift[3];
    int is_streamed;
} Painting;

enum { CANVAS, CONTENT };

/* Copies past the caches: an ordinary store first reads what it overwrites. */
static void stream(char *out, const char *bytes, size_t count) {
#if defined(__SSE2__)
    size_t head = (size_t)(-(intptr_t)out & 15);
    head = head < count ? head : count;
    memcpy(out, bytes, head);
    for (; head + 64 <= count; head += 64) {
        __m128i four[4];
        memcpy(four, bytes + head, 64);
        for (int at = 0; at < 4; at++) _mm_stream_si128((__m128i *)(out + head) + at, four[at]);
    }
    memcpy(out + head, bytes + head, count - head);
#else
    memcpy(out, bytes, count);
#endif
}

static void end_streams(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

static void copy_bytes(const Painting *all, uint8_t *out, const uint8_t *bytes, Py_ssize_t count) {
    if (all->is_streamed)
        stream((char *)out, (const char *)bytes, (size_t)count);
    else
        memcpy(out, bytes, (size_t)count);
}

static int paint_plane(Work *work, Py_ssize_t plane) {
    const Painting *all = (const Painting *)work;
    const Placement *at = &all->at;
    Py_ssize_t right = at->width - at->left - at->columns, below = at->height - at->top - at->lines;
    uint8_t *canvas = (uint8_t *)all->buffers.all[CANVAS].buf + plane * at->height * at->width, pad = all->pad[plane];
    const uint8_t *content = (const uint8_t *)all->buffers.all[CONTENT].buf + plane * at->lines * at->columns;
    memset(canvas, pad, (size_t)(at->top * at->width));
    canvas += at->top * at->width;
    if (at->columns == at->width) { /* lines follow each other */
        copy_bytes(all, canvas, content, at->lines * at->columns);
        canvas += at->lines * at->columns;
    } else
        for (Py_ssize_t line = 0; line < at->lines; line++) {
            memset(canvas, pad, (size_t)at->left);
            copy_bytes(all, canvas + at->left, content, at->columns);
            memset(canvas + at->left + at->columns, pad, (size_t)right);
            canvas += at->width;
            content += at->columns;
        }
    memset(canvas, pad, (size_t)(below * at->width));
    if (all->is_streamed) end_streams();
    return 1;
}

static FAST void fill_floats(float *out, float value, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = value;
}

/* Two roundings, as numpy's multiply and add: the file is compiled without contraction to a fused multiply-add. */
static FAST void scale_line(float *out, const uint8_t *line, Py_ssize_t count, float scale, float shift) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = (float)line[at] * scale + shift;
}

static int paint_scaled_plane(Work *work, Py_ssize_t plane) {
    const Painting *all = (const Painting *)work;
    const Placement *at = &all->at;
    Py_ssize_t right = at->width - at->left - at->columns, below = at->height - at->top - at->lines;
    float *canvas = (float *)all->buffers.all[CANVAS].buf + plane * at->height * at->width, pad = all->float_pad[plane];
    const uint8_t *content = (const uint8_t *)all->buffers.all[CONTENT].buf + plane * at->lines * at->columns;
    fill_floats(canvas, pad, at->top * at->width);
    canvas += at->top * at->width;
    for (Py_ssize_t line = 0; line < at->lines; line++) {
        fill_floats(canvas, pad, at->left);
        scale_line(canvas + at->left, content, at->columns, all->scale[plane], all->shift[plane]);
        fill_floats(canvas + at->left + at->columns, pad, right);
        canvas += at->width;
        content += at->columns;
    }
    fill_floats(canvas, pad, below * at->width);
    return 1;
}

static void release_painting(Work *work) { release(&((Painting *)work)->buffers); }

static int take_painting(Painting *all, PyObject *args, int is_scaled) {
    PyObject *canvas, *content;
    Placement *at = &all->at;
    float *pad = all->float_pad, *scale = all->scale, *shift = all->shift;
    if (!(is_scaled
              ? PyArg_ParseTuple(args, "O(nn)O(nnnn)(fff)(fff)(fff)", &canvas, &at->height, &at->width, &content,
                                 &at->left, &at->top, &at->columns, &at->lines, &pad[0], &pad[1], &pad[2], &scale[0],
                                 &scale[1], &scale[2], &shift[0], &shift[1], &shift[2])
              : PyArg_ParseTuple(args, "O(nn)O(nnnn)(bbb)p", &canvas, &at->height, &at->width, &content, &at->left,
                                 &at->top, &at->columns, &at->lines, &all->pad[0], &all->pad[1], &all->pad[2],
                                 &all->is_streamed)))
        return -1;
    if (take(&all->buffers, canvas, PyBUF_WRITABLE) < 0 || take(&all->buffers, content, PyBUF_SIMPLE) < 0) return -1;
    Py_ssize_t bytes = is_scaled ? (Py_ssize_t)sizeof(float) : 1, canvas_bytes = all->buffers.all[CANVAS].len;
    if (canvas_bytes % bytes) return failed("the canvas must be float32");
    return placed(at, canvas_bytes / bytes, all->buffers.all[CONTENT].len);
}

static PyObject *start_painted(PyObject *args, int is_scaled) {
    Painting *all = PyMem_Calloc(1, sizeof(Painting));
    if (!all) return PyErr_NoMemory();
    if (take_painting(all, args, is_scaled) < 0) {
        release_painting(&all->work);
        PyMem_Free(all);
        return NULL;
    }
    all->work.run = is_scaled ? paint_scaled_plane : paint_plane;
    all->work.release = release_painting, all->work.result = none;
    all->work.failed = all->work.pieces = 3;
    return started(&all->work);
}

static PyObject *start_painting(PyObject *self, PyObject *args) { return start_painted(args, 0); }

static PyObject *start_painting_scaled(PyObject *self, PyObject *args) { return start_painted(args, 1); }

/* token_places(places, ids, skipped, offsets, bytes, text) -> bool

   Write where each token begins in `text`. Token id is bytes[offsets[id]:offsets[id + 1]] without its first skipped[i]
   bytes; all tokens, one behind the other, must be the text. Returns False at the first that is not.

   places, offsets      int64
   ids                  uint32
   skipped              uint8, like ids */

static PyObject *token_places(PyObject *self, PyObject *args) {
    PyObject *objects[6], *result = NULL;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &objects[5]))
        return NULL;
    for (int at = 0; at < 6; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(uint32_t);
    Py_ssize_t ids_known = buffers.all[3].len / (Py_ssize_t)sizeof(int64_t) - 1;
    if (buffers.all[0].len / (Py_ssize_t)sizeof(int64_t) != count || buffers.all[2].len != count || ids_known < 0) {
        failed("places and skipped must have one number for each id");
        goto end;
    }
    int64_t *places = buffers.all[0].buf;
    const uint32_t *ids = buffers.all[1].buf;
    const uint8_t *skipped = buffers.all[2].buf;
    const int64_t *offsets = buffers.all[3].buf;
    const char *bytes = buffers.all[4].buf, *text = buffers.all[5].buf;
    int64_t size = buffers.all[4].len, text_size = buffers.all[5].len, begin = 0;
    Py_ssize_t at = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; at < count; at++) {
        if ((Py_ssize_t)ids[at] >= ids_known) break;
        int64_t start = offsets[ids[at]], stop = offsets[ids[at] + 1];
        if (start < 0 || stop > size || stop - start < skipped[at]) break;
        start += skipped[at];
        if (stop - start > text_size - begin) break;
        int64_t same = 0, length = stop - start; /* tokens are short: a call of memcmp takes longer */
        if (length > 0 && length <= 8 && start + 8 <= size && begin + 8 <= text_size) {
            uint64_t mine, theirs; /* on big-endian machines the loop below decides */
            memcpy(&mine, bytes + start, 8);
            memcpy(&theirs, text + begin, 8);
            if (length == 8 ? mine == theirs : PY_LITTLE_ENDIAN && !((mine ^ theirs) << (64 - 8 * length))) same = length;
        }
        while (same < length && bytes[start + same] == text[begin + same]) same++;
        if (same < length) break;
        places[at] = begin;
        begin += length;
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(at == count && begin == text_size);
end:
    release(&buffers);
    return result;
}

/* best_fit(bins, lengths, capacity): write the bin of each item. Lengths must not rise.

   An item goes into the bin with the least room that fits it; of several, into the one that has had this room longest;
   if none fits, into a new one. Bins with the same room are a queue; a bit for each room says whether it has a bin, and a
   bit for each 64 of them whether one of these is set.

   bins, lengths        int64 */

static int lowest_bit(uint64_t bits) {
#if defined(__GNUC__)
    return __builtin_ctzll(bits);
#else
    int at = 0;
    while (!(bits >> at & 1)) at++;
    return at;
#endif
}

static int64_t next_bit(const uint64_t *words, int64_t count, int64_t from) {
    int64_t at = from >> 6;
    if (at >= count) return -1;
    uint64_t bits = words[at] >> (from & 63) << (from & 63);
    while (!bits && ++at < count) bits = words[at];
    return bits ? (at << 6) + lowest_bit(bits) : -1;
}

typedef struct {
    uint64_t *rooms, *groups;
    int64_t group_words;
    int64_t *first, *last, *next; /* first and last bin of the queue of a room, the next one of a bin */
} Rooms;

static int64_t least_room(const Rooms *rooms, int64_t length) {
    uint64_t here = rooms->rooms[length >> 6] >> (length & 63);
    if (here) return length + lowest_bit(here);
    int64_t group = next_bit(rooms->groups, rooms->group_words, (length >> 6) + 1);
    return group < 0 ? -1 : (group << 6) + lowest_bit(rooms->rooms[group]);
}

static int64_t taken(Rooms *rooms, int64_t room) {
    int64_t bin = rooms->first[room];
    if (bin != rooms->last[room]) {
        rooms->first[room] = rooms->next[bin];
        return bin;
    }
    rooms->rooms[room >> 6] &= ~(1ULL << (room & 63));
    if (!rooms->rooms[room >> 6]) rooms->groups[room >> 12] &= ~(1ULL << (room >> 6 & 63));
    return bin;
}

static void put_back(Rooms *rooms, int64_t room, int64_t bin) {
    if (rooms->rooms[room >> 6] >> (room & 63) & 1)
        rooms->next[rooms->last[room]] = bin;
    else
        rooms->first[room] = bin;
    rooms->last[room] = bin;
    rooms->rooms[room >> 6] |= 1ULL << (room & 63);
    rooms->groups[room >> 12] |= 1ULL << (room >> 6 & 63);
}

static int fill_bins(int64_t *bins, const int64_t *lengths, Py_ssize_t count, int64_t capacity, Rooms *rooms) {
    int64_t opened = 0, before = capacity;
    for (Py_ssize_t at = 0; at < count; at++) {
        int64_t length = lengths[at];
        if (length < 1 || length > before) return 0;
        int64_t room = least_room(rooms, length);
        int64_t bin = room < 0 ? opened++ : taken(rooms, room);
        int64_t left = (room < 0 ? capacity : room) - length;
        if (left) put_back(rooms, left, bin);
        bins[at] = bin;
        before = length;
    }
    return 1;
}

static PyObject *best_fit(PyObject *self, PyObject *args) {
    PyObject *bins_object, *lengths_object, *result = NULL;
    Py_ssize_t capacity;
    Buffers buffers = {.count = 0};
    uint64_t *memory = NULL;
    if (!PyArg_ParseTuple(args, "OOn", &bins_object, &lengths_object, &capacity)) return NULL;
    if (take(&buffers, bins_object, PyBUF_WRITABLE) < 0 || take(&buffers, lengths_object, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(int64_t);
    if (buffers.all[0].len != buffers.all[1].len || capacity < 1 || capacity > INT32_MAX || count > PY_SSIZE_T_MAX / 64) {
        failed("bins must have one number for each length, and the capacity must be positive");
        goto end;
    }
    int64_t words = (capacity >> 6) + 1, groups = (words >> 6) + 1;
    memory = PyMem_Calloc((size_t)(words + groups + 2 * (capacity + 1) + count + 1), sizeof(uint64_t));
    if (!memory) {
        PyErr_NoMemory();
        goto end;
    }
    int64_t *queues = (int64_t *)(memory + words + groups);
    Rooms rooms = {memory, memory + words, groups, queues, queues + capacity + 1, queues + 2 * (capacity + 1)};
    int fits;
    Py_BEGIN_ALLOW_THREADS
    fits = fill_bins(buffers.all[0].buf, buffers.all[1].buf, count, capacity, &rooms);
    Py_END_ALLOW_THREADS
    if (fits)
        result = Py_NewRef(Py_None);
    else
        failed("lengths must be 1 to the capacity, and must not rise");
end:
    PyMem_Free(memory);
    release(&buffers);
    return result;
}

/* copy_runs(out, source, targets, starts, lengths): copy source[start:start + length] to out[target:] for each run.

   targets, starts, lengths     int64, in bytes */

static PyObject *copy_runs(PyObject *self, PyObject *args) {
    PyObject *objects[5], *result = NULL;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4])) return NULL;
    for (int at = 0; at < 5; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    Py_ssize_t size = buffers.all[2].len, count = size / (Py_ssize_t)sizeof(int64_t);
    const int64_t *targets = buffers.all[2].buf, *starts = buffers.all[3].buf, *lengths = buffers.all[4].buf;
    int64_t out_size = buffers.all[0].len, source_size = buffers.all[1].len;
    int sound = buffers.all[3].len == size && buffers.all[4].len == size;
    for (Py_ssize_t at = 0; sound && at < count; at++)
        sound = lengths[at] >= 0 && targets[at] >= 0 && starts[at] >= 0 && lengths[at] <= out_size &&
                lengths[at] <= source_size && targets[at] <= out_size - lengths[at] &&
                starts[at] <= source_size - lengths[at];
    if (!sound) {
        failed("a run lies outside of out or source");
        goto end;
    }
    char *out = buffers.all[0].buf;
    const char *source = buffers.all[1].buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) memcpy(out + targets[at], source + starts[at], (size_t)lengths[at]);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* frame_documents(out, item_bytes, ids, offsets, begin, end): write the ids of documents one after the other, each between
   the ids `begin` and `end`; -1 for none.

   out          2 or 4 bytes an id, of which it has the lowest bytes
   ids          uint32
   offsets      int64 [documents + 1]: where the ids of each document begin, and where the last one ends */

static FAST void narrow_16(uint16_t *out, const uint32_t *ids, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = (uint16_t)ids[at];
}

static char *put_ids(char *out, Py_ssize_t item_bytes, const uint32_t *ids, Py_ssize_t count) {
    if (item_bytes == 2)
        narrow_16((uint16_t *)out, ids, count);
    else
        memcpy(out, ids, (size_t)count * sizeof(*ids));
    return out + count * item_bytes;
}

static PyObject *frame_documents(PyObject *self, PyObject *args) {
    PyObject *objects[3], *result = NULL;
    Py_ssize_t item_bytes;
    long long begin, end;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OnOOLL", &objects[0], &item_bytes, &objects[1], &objects[2], &begin, &end)) return NULL;
    for (int at = 0; at < 3; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    const uint32_t *ids = buffers.all[1].buf, first = (uint32_t)begin, last = (uint32_t)end;
    const int64_t *offsets = buffers.all[2].buf;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(*ids);
    Py_ssize_t documents = buffers.all[2].len / (Py_ssize_t)sizeof(*offsets) - 1;
    int sound = (item_bytes == 2 || item_bytes == 4) && documents >= 0 && offsets[0] == 0 && offsets[documents] == count;
    for (Py_ssize_t at = 0; sound && at < documents; at++) sound = offsets[at] <= offsets[at + 1];
    if (!sound || buffers.all[0].len != (count + documents * ((begin >= 0) + (end >= 0))) * item_bytes) {
        failed("out must have room for the ids of all documents, and offsets must rise to the end of ids");
        goto end;
    }
    char *out = buffers.all[0].buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < documents; at++) {
        if (begin >= 0) out = put_ids(out, item_bytes, &first, 1);
        out = put_ids(out, item_bytes, ids + offsets[at], offsets[at + 1] - offsets[at]);
        if (end >= 0) out = put_ids(out, item_bytes, &last, 1);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* line_starts(block, at) -> list or None

   Return where the lines of a block of JSON lines begin, the first at 0; a newline before `at` is not looked for. None
   unless each line ends with "}" and the next one begins with "{". */

static PyObject *line_starts(PyObject *self, PyObject *args) {
    PyObject *block, *starts = NULL;
    Py_ssize_t at;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "On", &block, &at) || take(&buffers, block, PyBUF_SIMPLE) < 0) return NULL;
    const char *text = buffers.all[0].buf, *newline;
    Py_ssize_t size = buffers.all[0].len, begin = 0;
    int is_sound = at >= 0;
    starts = PyList_New(0);
    while (starts && is_sound) {
        PyObject *start = PyLong_FromSsize_t(begin);
        if (!start || PyList_Append(starts, start) < 0) Py_CLEAR(starts);
        Py_XDECREF(start);
        newline = starts && at < size ? memchr(text + at, '\n', (size_t)(size - at)) : NULL;
        Py_ssize_t end = newline ? newline - text : size;
        if (end >= size - 1) break;
        is_sound = text[end + 1] == '{' && ((end >= 1 && text[end - 1] == '}') ||
                                            (end >= 2 && text[end - 1] == '\r' && text[end - 2] == '}'));
        begin = at = end + 1;
    }
    release(&buffers);
    if (!starts || is_sound) return starts;
    Py_DECREF(starts);
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"set_helpers", set_helpers, METH_VARARGS, "Let further threads take part in the work of calls of this thread."},
    {"count_helpers", count_helpers, METH_NOARGS, "Return how many further threads take part in the work of this one."},
    {"finish", finish, METH_VARARGS, "Do what is left of work that was started, and return its result."},
    {"new_pool", new_pool, METH_VARARGS, "Return a pool that keeps at most `limit` bytes of free memory."},
    {"lend", lend, METH_VARARGS, "Return memory for a tensor, as a capsule that torch.from_dlpack takes."},
    {"lend_packed", lend_packed, METH_VARARGS, "Return memory for the batches of pack_rows."},
    {"free_bytes", free_bytes, METH_VARARGS, "Return how many bytes a pool keeps."},
    {"gather", gather, METH_VARARGS, "Copy the item at each address to out."},
    {"start_gathering", start_gathering, METH_VARARGS, "As gather, and return at once; `finish` ends it."},
    {"permute", permute, METH_VARARGS, "Replace each cell by where a shuffle puts it."},
    {"locate_rows", locate_rows, METH_VARARGS, "Write the chunk of each row and its number there; False if it has none."},
    {"read_rows", read_rows, METH_VARARGS, "Copy rows by number to out; False where one must not be read."},
    {"fixed_addresses", fixed_addresses, METH_VARARGS, "Write where rows are; False where one must not be read."},
    {"ragged_addresses", ragged_addresses, METH_VARARGS, "As fixed_addresses, and how many values the rows have."},
    {"decoded_addresses", decoded_addresses, METH_VARARGS, "Write where rows of decoded blocks are; return how many are not."},
    {"can_decode", can_decode, METH_NOARGS, "Return whether the system has a library for start_decoding."},
    {"zstd_version", zstd_version, METH_NOARGS, "Return the version of that library, an empty text without one."},
    {"start_decoding", start_decoding, METH_VARARGS, "Decode zstd frames; `finish` returns how many, up to a bad one."},
    {"pack_rows", pack_rows, METH_VARARGS, "Write tokens, lengths, labels and positions of packed rows."},
    {"start_packing", start_packing, METH_VARARGS, "As pack_rows, and return at once; `finish` returns the result."},
    {"mirror", mirror, METH_VARARGS, "Reverse each line of bytes."},
    {"start_painting", start_painting, METH_VARARGS, "Paint content and padding on a canvas of bytes."},
    {"start_painting_scaled", start_painting_scaled, METH_VARARGS, "The same, scaled, on a canvas of float32."},
    {"token_places", token_places, METH_VARARGS, "Write where tokens begin in a text; False if they are not its bytes."},
    {"best_fit", best_fit, METH_VARARGS, "Write the bin of each item, best fit, for lengths that do not rise."},
    {"copy_runs", copy_runs, METH_VARARGS, "Copy runs of bytes from one buffer to another."},
    {"frame_documents", frame_documents, METH_VARARGS, "Write the ids of documents between a begin and an end."},
    {"line_starts", line_starts, METH_VARARGS, "Return where JSON lines begin; None if one is not a whole object."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "forebay._native", "Loops in C; each has a twin in numpy.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    static int is_registered;
    has_cores = sysconf(_SC_NPROCESSORS_ONLN) > 1;
#if defined(__linux__)
    cpu_set_t cores; /* that this process may use */
    if (has_cores && !sched_getaffinity(0, sizeof(cores), &cores)) has_cores = CPU_COUNT(&cores) > 1;
#endif
    if (!is_registered) is_registered = !pthread_atfork(NULL, NULL, forget_helpers);
    return PyModuleDef_Init(&module);
}
