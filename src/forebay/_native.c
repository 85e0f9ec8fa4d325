/* Loops over bytes that numpy makes in several passes, or with the GIL held. Optional: without a compiler forebay does
   the same in numpy, bit for bit (tests/test_native.py compares the two).

   Every function checks sizes before it writes, then releases the GIL. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

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

/* gather(out, addresses, item_bytes): copy the item at each address. */

static void prefetch(const char *address) {
#if defined(__GNUC__)
    __builtin_prefetch(address);
    __builtin_prefetch(address + 64);
#endif
}

static PyObject *gather(PyObject *self, PyObject *args) {
    PyObject *out_object, *addresses_object, *result = NULL;
    Py_ssize_t item;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOn", &out_object, &addresses_object, &item)) return NULL;
    if (take(&buffers, out_object, PyBUF_WRITABLE) < 0 || take(&buffers, addresses_object, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(int64_t);
    if (item < 0 || (item && count > PY_SSIZE_T_MAX / item) || buffers.all[0].len != count * item) {
        failed("out must hold one item for each address");
        goto end;
    }
    char *out = buffers.all[0].buf;
    const int64_t *addresses = buffers.all[1].buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) {
        if (at + 1 < count) prefetch((const char *)(intptr_t)addresses[at + 1]);
        memcpy(out + at * item, (const void *)(intptr_t)addresses[at], (size_t)item);
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
        if (rows[at] < starts[0] || rows[at] >= starts[chunks]) break;
        Py_ssize_t low = 0, high = chunks; /* starts[low] <= row < starts[high] */
        while (high - low > 1) {
            Py_ssize_t middle = low + (high - low) / 2;
            if (starts[middle] <= rows[at])
                low = middle;
            else
                high = middle;
        }
        found[at] = low;
        within[at] = rows[at] - starts[low];
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(at == count);
end:
    release(&buffers);
    return result;
}

/* gather_rows(out, chunks, rows, bases, limits, item_bytes) -> bool

   Copy row rows[i] of chunk chunks[i]. bases has the address of each chunk's first row, 0 where it is not mapped; limits
   has the offsets in bytes, exclusive, at which a row may start. Returns False, and leaves `out` unfinished, at the
   first row that is not mapped or out of bounds. */

static PyObject *gather_rows(PyObject *self, PyObject *args) {
    PyObject *objects[5], *result = NULL;
    Py_ssize_t item;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOOOn", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &item))
        return NULL;
    for (int at = 0; at < 5; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(int64_t);
    uint64_t chunk_count = (uint64_t)buffers.all[3].len / sizeof(int64_t);
    if (item < 1 || count > PY_SSIZE_T_MAX / item || buffers.all[0].len != count * item ||
        buffers.all[2].len != buffers.all[1].len || buffers.all[4].len != buffers.all[3].len) {
        failed("out must hold one item for each row, and tables one number for each chunk");
        goto end;
    }
    char *out = buffers.all[0].buf;
    const int64_t *chunks = buffers.all[1].buf, *rows = buffers.all[2].buf, *bases = buffers.all[3].buf;
    const uint64_t *limits = buffers.all[4].buf;
    Py_ssize_t at = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; at < count; at++) {
        uint64_t chunk = (uint64_t)chunks[at], row = (uint64_t)rows[at];
        if (chunk >= chunk_count || !bases[chunk] || row > (uint64_t)INT64_MAX / (uint64_t)item ||
            row * (uint64_t)item >= limits[chunk])
            break;
        if (at + 1 < count && (uint64_t)chunks[at + 1] < chunk_count)
            prefetch((const char *)(intptr_t)((uint64_t)bases[chunks[at + 1]] + (uint64_t)rows[at + 1] * (uint64_t)item));
        memcpy(out + at * item, (const void *)(intptr_t)((uint64_t)bases[chunk] + row * (uint64_t)item), (size_t)item);
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(at == count);
end:
    release(&buffers);
    return result;
}

/* pack_rows(tokens_at, token_bytes, width, lengths_at, counts, seq_lens, stored, wide, labels, positions, shifted) -> bool

   Write a batch of packed rows, each read once from where it is: `width` tokens, and the lengths of its documents.

   tokens_at    int64 [rows]: addresses of the tokens of each row, of 2 or 4 bytes
   lengths_at   int64 [rows]: addresses of the lengths of each row, of 4 bytes; counts, int64 [rows]: how many they are
   seq_lens     int32 [rows, documents]: the lengths, filled up with 0
   stored       the tokens as they are, or None
   wide, labels, positions      int64 [rows, width], or None

       tokens       5 6 7 8 9 0 0     lengths 3 2; the rest of a row is padding
       positions    0 1 2 0 1 0 1
       shifted      6 7 . 9 . . .     . = -100
       unshifted    . 6 7 . 9 . .

   Returns False, and leaves the outputs unfinished, at the first row whose documents are longer than the row, or whose
   tokens are not aligned. */

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

static void label_row(int64_t *labels, const char *tokens, Py_ssize_t token_bytes, Py_ssize_t width,
                      const int32_t *lengths, Py_ssize_t documents, int shifted) {
    if (shifted)
        widen(labels, tokens + token_bytes, token_bytes, width - 1);
    else
        widen(labels, tokens, token_bytes, width);
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

/* While a row is written, the next one arrives from memory. */
static void prefetch_row(int64_t address, Py_ssize_t bytes) {
#if defined(__GNUC__)
    for (Py_ssize_t at = 0; at < bytes && at < 4096; at += 64) __builtin_prefetch((const char *)(intptr_t)address + at);
#endif
}

static PyObject *pack_rows(PyObject *self, PyObject *args) {
    enum { TOKENS_AT, LENGTHS_AT, COUNTS, SEQ_LENS, STORED, WIDE, LABELS, POSITIONS, OBJECTS };
    PyObject *objects[OBJECTS], *result = NULL;
    Py_ssize_t token_bytes, width;
    int shifted;
    Buffers buffers = {.count = 0};
    char *memory[OBJECTS] = {NULL};
    Py_ssize_t sizes[OBJECTS] = {0};
    if (!PyArg_ParseTuple(args, "OnnOOOOOOOp", &objects[TOKENS_AT], &token_bytes, &width, &objects[LENGTHS_AT],
                          &objects[COUNTS], &objects[SEQ_LENS], &objects[STORED], &objects[WIDE], &objects[LABELS],
                          &objects[POSITIONS], &shifted))
        return NULL;
    for (int at = 0; at < OBJECTS; at++) {
        if (at >= STORED && Py_IsNone(objects[at])) continue;
        if (take(&buffers, objects[at], at >= SEQ_LENS ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) goto end;
        memory[at] = buffers.all[buffers.count - 1].buf;
        sizes[at] = buffers.all[buffers.count - 1].len;
    }
    if ((token_bytes != 2 && token_bytes != 4) || width < 1 || width > INT32_MAX) {
        failed("tokens must have 2 or 4 bytes, and rows at least one token");
        goto end;
    }
    Py_ssize_t rows = sizes[TOKENS_AT] / (Py_ssize_t)sizeof(int64_t), row_bytes = token_bytes * width;
    Py_ssize_t documents = rows ? sizes[SEQ_LENS] / (Py_ssize_t)sizeof(int32_t) / rows : 0;
    if (sizes[LENGTHS_AT] != sizes[TOKENS_AT] || sizes[COUNTS] != sizes[TOKENS_AT] ||
        sizes[SEQ_LENS] != rows * documents * (Py_ssize_t)sizeof(int32_t)) {
        failed("tokens and lengths must have the same rows");
        goto end;
    }
    for (int at = STORED; at < OBJECTS; at++) {
        Py_ssize_t bytes = at == STORED ? row_bytes : width * (Py_ssize_t)sizeof(int64_t);
        if (memory[at] && (rows > PY_SSIZE_T_MAX / bytes || sizes[at] != rows * bytes)) {
            failed("outputs must be int64 [rows, width]");
            goto end;
        }
    }
    const int64_t *tokens_at = (int64_t *)memory[TOKENS_AT], *lengths_at = (int64_t *)memory[LENGTHS_AT];
    const int64_t *counts = (int64_t *)memory[COUNTS];
    for (Py_ssize_t row = 0; row < rows; row++)
        if (counts[row] < 0 || counts[row] > documents) {
            failed("seq_lens must hold the lengths of each row");
            goto end;
        }
    int32_t *seq_lens = (int32_t *)memory[SEQ_LENS];
    int64_t *wide = (int64_t *)memory[WIDE], *labels = (int64_t *)memory[LABELS], *positions = (int64_t *)memory[POSITIONS];
    Py_ssize_t row = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; row < rows; row++) {
        const char *tokens = (const char *)(intptr_t)tokens_at[row];
        if ((uint64_t)tokens_at[row] % (uint64_t)token_bytes) break; /* a tensor of a file may begin anywhere */
        int32_t *lengths = seq_lens + row * documents;
        int fits = copy_lengths(lengths, documents, lengths_at[row], counts[row], width);
        if (!fits && (labels || positions)) break;
        if (row + 1 < rows) prefetch_row(tokens_at[row + 1], row_bytes);
        if (memory[STORED]) memcpy(memory[STORED] + row * row_bytes, tokens, (size_t)row_bytes);
        if (wide) widen(wide + row * width, tokens, token_bytes, width);
        if (labels) label_row(labels + row * width, tokens, token_bytes, width, lengths, documents, shifted);
        if (positions) position_row(positions + row * width, width, lengths, documents);
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(row == rows);
end:
    release(&buffers);
    return result;
}

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

/* paint(canvas, size, content, box, pad): content [3, lines, columns] in its box on a canvas [3, height, width].
   paint_scaled(canvas, size, content, box, pad, scale, shift): the same as float32, value * scale + shift. */

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

static void paint_bytes(uint8_t *canvas, const uint8_t *content, const Placement *at, const uint8_t *pad) {
    Py_ssize_t right = at->width - at->left - at->columns, below = at->height - at->top - at->lines;
    for (int plane = 0; plane < 3; plane++) {
        memset(canvas, pad[plane], (size_t)(at->top * at->width));
        canvas += at->top * at->width;
        for (Py_ssize_t line = 0; line < at->lines; line++) {
            memset(canvas, pad[plane], (size_t)at->left);
            memcpy(canvas + at->left, content, (size_t)at->columns);
            memset(canvas + at->left + at->columns, pad[plane], (size_t)right);
            canvas += at->width;
            content += at->columns;
        }
        memset(canvas, pad[plane], (size_t)(below * at->width));
        canvas += below * at->width;
    }
}

static FAST void fill_floats(float *out, float value, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = value;
}

/* Two roundings, as numpy's multiply and add: the file is compiled without contraction to a fused multiply-add. */
static FAST void scale_line(float *out, const uint8_t *line, Py_ssize_t count, float scale, float shift) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = (float)line[at] * scale + shift;
}

static void paint_floats(float *canvas, const uint8_t *content, const Placement *at, const float *pad,
                         const float *scale, const float *shift) {
    Py_ssize_t right = at->width - at->left - at->columns, below = at->height - at->top - at->lines;
    for (int plane = 0; plane < 3; plane++) {
        fill_floats(canvas, pad[plane], at->top * at->width);
        canvas += at->top * at->width;
        for (Py_ssize_t line = 0; line < at->lines; line++) {
            fill_floats(canvas, pad[plane], at->left);
            scale_line(canvas + at->left, content, at->columns, scale[plane], shift[plane]);
            fill_floats(canvas + at->left + at->columns, pad[plane], right);
            canvas += at->width;
            content += at->columns;
        }
        fill_floats(canvas, pad[plane], below * at->width);
        canvas += below * at->width;
    }
}

static PyObject *paint(PyObject *self, PyObject *args) {
    PyObject *canvas, *content, *result = NULL;
    Placement at;
    unsigned char pad[3];
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "O(nn)O(nnnn)(bbb)", &canvas, &at.height, &at.width, &content, &at.left, &at.top,
                          &at.columns, &at.lines, &pad[0], &pad[1], &pad[2]))
        return NULL;
    if (take(&buffers, canvas, PyBUF_WRITABLE) < 0 || take(&buffers, content, PyBUF_SIMPLE) < 0) goto end;
    if (placed(&at, buffers.all[0].len, buffers.all[1].len) < 0) goto end;
    Py_BEGIN_ALLOW_THREADS
    paint_bytes(buffers.all[0].buf, buffers.all[1].buf, &at, pad);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

static PyObject *paint_scaled(PyObject *self, PyObject *args) {
    PyObject *canvas, *content, *result = NULL;
    Placement at;
    float pad[3], scale[3], shift[3];
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "O(nn)O(nnnn)(fff)(fff)(fff)", &canvas, &at.height, &at.width, &content, &at.left,
                          &at.top, &at.columns, &at.lines, &pad[0], &pad[1], &pad[2], &scale[0], &scale[1], &scale[2],
                          &shift[0], &shift[1], &shift[2]))
        return NULL;
    if (take(&buffers, canvas, PyBUF_WRITABLE) < 0 || take(&buffers, content, PyBUF_SIMPLE) < 0) goto end;
    if (buffers.all[0].len % (Py_ssize_t)sizeof(float)) {
        failed("the canvas must be float32");
        goto end;
    }
    if (placed(&at, buffers.all[0].len / (Py_ssize_t)sizeof(float), buffers.all[1].len) < 0) goto end;
    Py_BEGIN_ALLOW_THREADS
    paint_floats(buffers.all[0].buf, buffers.all[1].buf, &at, pad, scale, shift);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

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

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, "Copy the item at each address to out."},
    {"locate_rows", locate_rows, METH_VARARGS, "Write the chunk of each row and its number there; False if it has none."},
    {"gather_rows", gather_rows, METH_VARARGS, "Copy rows of mapped chunks to out; False where one is out of bounds."},
    {"pack_rows", pack_rows, METH_VARARGS, "Write tokens, lengths, labels and positions of packed rows."},
    {"mirror", mirror, METH_VARARGS, "Reverse each line of bytes."},
    {"paint", paint, METH_VARARGS, "Paint content and padding on a canvas of bytes."},
    {"paint_scaled", paint_scaled, METH_VARARGS, "Paint scaled content and padding on a canvas of float32."},
    {"token_places", token_places, METH_VARARGS, "Write where tokens begin in a text; False if they are not its bytes."},
    {"best_fit", best_fit, METH_VARARGS, "Write the bin of each item, best fit, for lengths that do not rise."},
    {"copy_runs", copy_runs, METH_VARARGS, "Copy runs of bytes from one buffer to another."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "forebay._native", "Loops in C; each has a twin in numpy.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
