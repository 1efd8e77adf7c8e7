SELECT id, cents FROM provider_charge WHERE key = $1;
