-- Functions and triggers of the first migration. They guard the lifecycle's rules against raw SQL and forms;
-- the rules themselves are horde/lifecycle/.

-- The broker's clock. Tests move `clock.ahead`; nothing else does. In PL/pgSQL, whose plan lasts a session: before
-- PostgreSQL 18 a function in SQL that reads a table is planned anew for each place in each statement.
CREATE FUNCTION horde_now() RETURNS timestamptz LANGUAGE plpgsql STABLE PARALLEL SAFE AS
$$ BEGIN RETURN statement_timestamp() + (SELECT ahead FROM clock WHERE id = 1); END $$;

-- When a term that began at `begun` and was to last until `until` is over, if time without any broker does not count:
-- each outage that begins within it makes it longer by its length, and it ends at least 60 s after the last of them.
CREATE FUNCTION without_outages(begun timestamptz, until timestamptz) RETURNS timestamptz LANGUAGE plpgsql STABLE AS
$$
DECLARE
    outage record;
    ending timestamptz := until;
BEGIN
    -- An outage is on record from the last heartbeat before it: a term that began in those last seconds suffered it as well.
    FOR outage IN SELECT greatest(o.begun, without_outages.begun) AS begun, o.ended FROM outages o
                  WHERE o.ended > without_outages.begun AND o.begun <= horde_now() ORDER BY o.begun LOOP
        EXIT WHEN outage.begun > ending;
        ending := greatest(ending + (outage.ended - outage.begun), outage.ended + interval '60 seconds');
    END LOOP;
    RETURN ending;
END
$$;

CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'illegal transition: %', TG_ARGV[0] USING ERRCODE = 'check_violation'; END $$;

CREATE TRIGGER outcome_is_set_once BEFORE UPDATE ON requests FOR EACH ROW
    WHEN (OLD.outcome IS NOT NULL AND (NEW.outcome, NEW.outcome_reason, NEW.error_code, NEW.outcome_at)
          IS DISTINCT FROM (OLD.outcome, OLD.outcome_reason, OLD.error_code, OLD.outcome_at))
    EXECUTE FUNCTION refuse('a request has one outcome');
CREATE TRIGGER done_is_final BEFORE UPDATE ON requests FOR EACH ROW
    WHEN (OLD.done_at IS NOT NULL AND (NEW.done_at, NEW.waiting, NEW.processing, NEW.stored)
          IS DISTINCT FROM (OLD.done_at, OLD.waiting, OLD.processing, OLD.stored))
    EXECUTE FUNCTION refuse('a done request stays as it is');

CREATE TRIGGER job_settles_once BEFORE UPDATE ON jobs FOR EACH ROW
    WHEN (OLD.state <> 'processing' AND (NEW.state, NEW.result, NEW.price, NEW.reward, NEW.settled_at)
          IS DISTINCT FROM (OLD.state, OLD.result, OLD.price, OLD.reward, OLD.settled_at))
    EXECUTE FUNCTION refuse('a settled job stays as it is');
CREATE TRIGGER job_begins_processing BEFORE INSERT ON jobs FOR EACH ROW
    WHEN (NEW.state <> 'processing') EXECUTE FUNCTION refuse('a job begins as processing');

CREATE TRIGGER slot_ends_once BEFORE UPDATE ON slots FOR EACH ROW
    WHEN (OLD.state IN ('stored', 'dropped') AND NEW.state <> OLD.state)
    EXECUTE FUNCTION refuse('a stored or dropped slot stays so');
CREATE TRIGGER slot_is_stored_from_processing BEFORE UPDATE ON slots FOR EACH ROW
    WHEN (NEW.state = 'stored' AND OLD.state NOT IN ('processing', 'stored'))
    EXECUTE FUNCTION refuse('only a processing slot can be stored');

CREATE FUNCTION refuse_waiting_after_outcome() RETURNS trigger LANGUAGE plpgsql AS
$$
BEGIN
    IF EXISTS (SELECT FROM requests WHERE id = NEW.request_id AND outcome IS NOT NULL) THEN
        RAISE EXCEPTION 'illegal transition: nothing waits after an outcome' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER nothing_waits_after_an_outcome BEFORE UPDATE ON slots FOR EACH ROW
    WHEN (NEW.state = 'waiting' AND OLD.state <> 'waiting') EXECUTE FUNCTION refuse_waiting_after_outcome();
CREATE TRIGGER nothing_new_waits_after_an_outcome BEFORE INSERT ON slots FOR EACH ROW
    WHEN (NEW.state = 'waiting') EXECUTE FUNCTION refuse_waiting_after_outcome();

-- Append-only.
CREATE TRIGGER events_stay BEFORE UPDATE OR DELETE ON events FOR EACH ROW EXECUTE FUNCTION refuse('events are append-only');
CREATE TRIGGER ledger_stays BEFORE UPDATE OR DELETE ON ledger FOR EACH ROW EXECUTE FUNCTION refuse('the ledger is append-only');

-- A worker's speed. None of these can fail, whatever their arguments: they stand in the fold, in which one row stops all
-- others, and in reads of everybody.

-- Seconds that a job ran, by the timings of its event; 0 where they do not tell.
CREATE FUNCTION run_seconds(timings jsonb) RETURNS double precision LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
$$ SELECT CASE WHEN jsonb_typeof(timings -> 'run_ms') = 'number'
               THEN least(greatest((timings ->> 'run_ms')::numeric, 0), 1e9)::double precision / 1000 ELSE 0 END $$;

-- What is left of a sum over recent jobs once `jobs` newer ones count more. The power and the rest have an end well above
-- what a double can hold, beyond which its arithmetic is an error.
CREATE FUNCTION faded(recent double precision, memory double precision, jobs bigint) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
$$ SELECT CASE WHEN recent BETWEEN 1e-6 AND 1e12 THEN recent * memory ^ least(jobs, 100)::double precision ELSE 0 END $$;

-- NULL where there is too little to tell.
CREATE FUNCTION tokens_per_second(tokens double precision, seconds double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
$$ SELECT CASE WHEN tokens BETWEEN 1e-6 AND 1e12 AND seconds BETWEEN 1e-3 AND 1e12 THEN tokens / seconds END $$;

-- What each worker offers, by the names that the pop filter uses. Speed is tokens per second, NULL until measured.
CREATE VIEW worker_offers AS
SELECT w.id, w.kind, w.owner_id, w.models, w.max_length, w.max_context_length, w.threads, w.maintenance, owner.trusted,
       tokens_per_second(t.recent_tokens, t.recent_seconds) AS speed, w.last_check_in
FROM workers w JOIN users owner ON owner.id = w.owner_id LEFT JOIN worker_totals t ON t.worker_id = w.id
WHERE w.deleted_at IS NULL;

INSERT INTO clock DEFAULT VALUES;
INSERT INTO heartbeat (beat_at) VALUES (horde_now());
INSERT INTO leader DEFAULT VALUES;
INSERT INTO accounts (kind) VALUES ('mint'), ('horde'), ('write_off');
-- The anonymous account: everybody knows its key, so its hash is no secret.
INSERT INTO users (id, name, key_hash, created_at, concurrency)
    VALUES (0, 'Anonymous', encode(sha256('0000000000'), 'hex'), horde_now(), 500);
INSERT INTO accounts (kind, user_id, floor) VALUES ('user', 0, -5000);
