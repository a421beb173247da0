-- \aset leaves jid alone where another client was faster and nothing is left; \gset would end this client.
\set jid 0
INSERT INTO jobs(payload) VALUES (repeat('x',400));
UPDATE jobs SET state='running', started_at=clock_timestamp(), worker_id=:client_id WHERE id=(SELECT id FROM jobs WHERE state='queued' ORDER BY priority DESC, id LIMIT 1 FOR UPDATE SKIP LOCKED) AND state='queued' RETURNING id AS jid \aset
UPDATE jobs SET state='done', result=repeat('y',1000) WHERE id=:jid AND state='running';
