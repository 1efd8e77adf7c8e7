-- Compiling these statements takes a hundred times as long as running them.
SELECT set_config('jit', 'off', false)
