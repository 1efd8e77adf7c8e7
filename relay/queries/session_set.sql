-- What a session of the relay's is set to, in one round trip. Not by the parameters of a connection's start: poolers refuse
-- those that they do not know. {settings} is a list of ('name', 'value').
SELECT set_config(wanted.name, wanted.value, false) FROM (VALUES {settings}) AS wanted(name, value)
