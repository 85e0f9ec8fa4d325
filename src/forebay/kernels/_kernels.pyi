from forebay.kernels.reference import *  # noqa: F403 - the same functions
