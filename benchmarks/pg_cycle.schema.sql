-- The floor of a queue's cycle in plain SQL: enqueue, claim, complete, and nothing else that a broker has to do.
DROP TABLE IF EXISTS jobs;
CREATE TABLE jobs(
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  state text NOT NULL DEFAULT 'queued',
  priority int NOT NULL DEFAULT 0,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  started_at timestamptz, worker_id int, faults smallint NOT NULL DEFAULT 0,
  payload text NOT NULL, result text);
