-- The identifier of the cluster that answers. A statement of its own, because not every role may call this function.
SELECT system_identifier FROM pg_control_system()
