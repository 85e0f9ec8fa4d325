"""Orders, draws, splits and shares as functions of numbers: nothing here opens, remembers or knows a rank."""
