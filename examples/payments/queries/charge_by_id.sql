SELECT id, cents FROM provider_charge WHERE id = $1;
