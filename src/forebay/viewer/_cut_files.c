/* Reading a mapped file that was cut short, or that has a bad sector, ends a process by SIGBUS. The process of
   `forebay view` must not end: the page that cannot be read becomes one of zeros, and is counted. Whoever reads compares
   the count before and after, and throws away what was read in between. */

#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static atomic_ulong pages;
static struct sigaction before;
static uintptr_t page_bytes;

/* Only system calls: this interrupts any thread, anywhere. */
static void fill(int number, siginfo_t *fault, void *context) {
    int kept = errno;
    void *page = (void *)((uintptr_t)fault->si_addr & ~(page_bytes - 1));
    if (fault->si_code != BUS_ADRERR ||
        mmap(page, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        sigaction(SIGBUS, &before, NULL); /* the same instruction faults again, and ends as without this */
    else
        atomic_fetch_add(&pages, 1);
    errno = kept;
}

static PyObject *survive(PyObject *self, PyObject *args) {
    struct sigaction action = {.sa_sigaction = fill, .sa_flags = SA_SIGINFO};
    if (page_bytes) Py_RETURN_NONE;
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &before) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *count(PyObject *self, PyObject *args) { return PyLong_FromUnsignedLong(atomic_load(&pages)); }

static PyMethodDef methods[] = {
    {"survive", survive, METH_NOARGS, "From now on, read zeros where a mapped file has no bytes any more."},
    {"count", count, METH_NOARGS, "Return how many pages of zeros were read."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "forebay.viewer._cut_files", "Survive mapped files that are cut short.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__cut_files(void) { return PyModuleDef_Init(&module); }
