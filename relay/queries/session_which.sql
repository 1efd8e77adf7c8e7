-- Which of Postgres' sessions answers, on which start of the server.
SELECT pg_backend_pid()::text || ' ' || extract(epoch FROM pg_postmaster_start_time())::text
