-- A sweep of four trials as release 0.1.0 wrote it, brought up to schema 6; plain SQL, for SQLite and PostgreSQL.
CREATE TABLE lora_tune_attempt (
	sweep VARCHAR(64) NOT NULL, 
	trial INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	state TEXT, 
	job_name TEXT, 
	job_id TEXT, 
	started_at FLOAT, 
	ended_at FLOAT, 
	record TEXT NOT NULL, 
	PRIMARY KEY (sweep, trial, number)
);
INSERT INTO "lora_tune_attempt" VALUES('built',0,0,'ended','built-0000-0','1000',1760000004.0,1.76000211500945258139e+09,'{"trial": 0, "number": 0, "job_name": "built-0000-0", "folder": "trials/0000/attempt-0", "job_id": "1000", "state": "ended", "intended_at": 1760000000.0, "submitted_at": 1760000001.0, "started_at": 1760000004.0, "ended_at": 1760002115.0094526, "node_count": 1, "nodes": ["node1"], "exclude_nodes": [], "exit_code": 0, "stop": "", "stop_sentence": "", "stop_at": null, "killed_at": null, "failure": "", "line": "", "remedy": ""}');
INSERT INTO "lora_tune_attempt" VALUES('built',1,0,'ended','built-0001-0','1010',1760000004.0,1.76000327416624069215e+09,'{"trial": 1, "number": 0, "job_name": "built-0001-0", "folder": "trials/0001/attempt-0", "job_id": "1010", "state": "ended", "intended_at": 1760000000.0, "submitted_at": 1760000001.0, "started_at": 1760000004.0, "ended_at": 1760003274.1662407, "node_count": 1, "nodes": ["node2"], "exclude_nodes": [], "exit_code": 0, "stop": "pruned", "stop_sentence": "stalled: two evals in a row 0.0081 above the median curve; 0.3% of good runs look like this", "stop_at": null, "killed_at": null, "failure": "", "line": "", "remedy": ""}');
INSERT INTO "lora_tune_attempt" VALUES('built',2,0,'ended','built-0002-0','1020',1.76000212400945258142e+09,1.76000456201104855534e+09,'{"trial": 2, "number": 0, "job_name": "built-0002-0", "folder": "trials/0002/attempt-0", "job_id": "1020", "state": "ended", "intended_at": 1760002120.0094526, "submitted_at": 1760002121.0094526, "started_at": 1760002124.0094526, "ended_at": 1760004562.0110486, "node_count": 1, "nodes": ["node1"], "exclude_nodes": [], "exit_code": 0, "stop": "pruned", "stop_sentence": "stalled: two evals in a row 0.0081 above the median curve; 0.3% of good runs look like this", "stop_at": null, "killed_at": null, "failure": "", "line": "", "remedy": ""}');
INSERT INTO "lora_tune_attempt" VALUES('built',3,0,'running','built-0003-0','1030',1.76000328316624069218e+09,NULL,'{"trial": 3, "number": 0, "job_name": "built-0003-0", "folder": "trials/0003/attempt-0", "job_id": "1030", "state": "running", "intended_at": 1760003279.1662407, "submitted_at": 1760003280.1662407, "started_at": 1760003283.1662407, "ended_at": null, "node_count": 1, "nodes": ["node2"], "exclude_nodes": [], "exit_code": null, "stop": "", "stop_sentence": "", "stop_at": null, "killed_at": null, "failure": "", "line": "", "remedy": ""}');
CREATE TABLE lora_tune_eval (
	sweep VARCHAR(64) NOT NULL, 
	trial INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	samples FLOAT, 
	loss FLOAT, 
	seconds FLOAT, 
	PRIMARY KEY (sweep, trial, attempt, position)
);
INSERT INTO "lora_tune_eval" VALUES('built',0,0,0,3456.0,9.29030360769232288475e-01,1.57064409757015141619e+03);
INSERT INTO "lora_tune_eval" VALUES('built',0,0,1,3840.0,9.26255630885912784044e-01,1.77582677507794596746e+03);
INSERT INTO "lora_tune_eval" VALUES('built',0,0,2,4224.0,9.23919976580640067709e-01,1.9810094525857407462e+03);
INSERT INTO "lora_tune_eval" VALUES('built',1,0,0,6528.0,9.26879054454818107622e-01,2.93504589405728893315e+03);
INSERT INTO "lora_tune_eval" VALUES('built',1,0,1,6912.0,0.926145038316672,3.14016624076654125028e+03);
INSERT INTO "lora_tune_eval" VALUES('built',2,0,0,4992.0,9.26797040323562693053e-01,2.1135729104385914069e+03);
INSERT INTO "lora_tune_eval" VALUES('built',2,0,1,5376.0,9.2582576359125812182e-01,2.30800159585694427723e+03);
INSERT INTO "lora_tune_eval" VALUES('built',3,0,0,2304.0,9.28993246072947531644e-01,1.0575070592568310985e+03);
INSERT INTO "lora_tune_eval" VALUES('built',3,0,1,2688.0,9.25361908954167922125e-01,1.26250823579963639532e+03);
CREATE TABLE lora_tune_lease (
	name VARCHAR(64) NOT NULL, 
	owner TEXT NOT NULL, 
	token INTEGER NOT NULL, 
	renewed_at FLOAT NOT NULL, 
	wrote INTEGER NOT NULL, saves INTEGER NOT NULL DEFAULT 0, 
	PRIMARY KEY (name)
);
INSERT INTO "lora_tune_lease" VALUES('built','node7 pid 12 start 99',1,1760000060.0,1,0);
CREATE TABLE lora_tune_request (
	sweep VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	record TEXT NOT NULL, 
	PRIMARY KEY (sweep, number)
);
INSERT INTO "lora_tune_request" VALUES('built',0,'{"number": 0, "kind": "pause", "what": {}, "who": "ann@login1", "asked_at": 1760000010.0, "answered_at": 1760000011.0, "accepted": true, "answer": "no trial is proposed until resume; what runs goes on"}');
CREATE TABLE lora_tune_remark (
	sweep VARCHAR(64) NOT NULL, 
	trial INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	text TEXT NOT NULL, 
	who TEXT NOT NULL, 
	written_at FLOAT NOT NULL, 
	PRIMARY KEY (sweep, trial, version)
);
INSERT INTO "lora_tune_remark" VALUES('built',0,1,'look at this one','ann@login1',1760000020.0);
CREATE TABLE lora_tune_sweep (
	name VARCHAR(64) NOT NULL, 
	digest VARCHAR(12) NOT NULL, 
	study_toml TEXT NOT NULL, 
	began_at FLOAT NOT NULL, 
	cwd TEXT NOT NULL DEFAULT '', file TEXT NOT NULL DEFAULT '', folder TEXT NOT NULL DEFAULT '', options TEXT NOT NULL DEFAULT '{}', ended TEXT NOT NULL DEFAULT '', id VARCHAR(32) NOT NULL DEFAULT '', signature TEXT NOT NULL DEFAULT '', 
	PRIMARY KEY (name)
);
INSERT INTO "lora_tune_sweep" VALUES('built','6b63f837b398','
description = "a study for tests"
[workload]
kind = "command"
argv = ["bash", "train.sh"]
[site]
system = "H100"
launcher = "slurm"
nodes = 1
gpus_per_node = 8
[space]
LR = { type = "float", low = 1e-4, high = 2e-3, log = true }
MAX_STEPS = { type = "int", low = 400, high = 1200, step = 100 }
layout = { type = "layout", tp = [1, 2, 4, 8], minibs = [1, 2, 4] }
[objective]
target = 0.925
[budget]
trials = 40
parallel = 2
node_hours = 60
price_per_node_hour = 25
',1760000000.0,'','','','{}','','0123456789abcdef0123456789abcdef','');
CREATE TABLE lora_tune_trial (
	sweep VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	state TEXT, 
	verdict TEXT, 
	seconds FLOAT, 
	samples FLOAT, 
	record TEXT NOT NULL, 
	PRIMARY KEY (sweep, number)
);
INSERT INTO "lora_tune_trial" VALUES('built',0,'finished','reached',1.9810094525857407462e+03,4224.0,'{"number": 0, "seed": 1, "tuned": {"LR": 0.0012549261172250152, "MAX_STEPS": 1000, "layout": "tp1 pp1 cp1 minibs1 mbs1"}, "parameters": {"LR": 0.0012549261172250152, "MAX_STEPS": 1000, "TP": 1, "PP": 1, "CP": 1, "MINIBS": 1, "MBS": 1, "GBS": 8}, "why": "random start", "state": "finished", "verdict": "reached", "sentence": "eval loss 0.9239 at 4224 samples, 1981.0 s", "seconds": 1981.0094525857407, "samples": 4224.0, "facts": {"samples_per_second": 2.249788939375314, "seconds_per_eval": 34.5, "crossing_samples": 4043.758223675554, "crossing_low": 3742.8333620458525, "crossing_high": 4368.877529350008, "eval_samples": 384.0, "pace_spread": 0.0, "init_seconds": 120.0, "evals": 3.0, "last_loss": 0.9239199765806401, "last_samples": 4224.0, "node_hours": 0.586391514605946, "stop_samples": 4224.0, "stop_seconds": 1981.0094525857407, "objective": 1981.0094525857407, "crossing_method": "free fit to the last 3 evals"}, "proposed_at": 1760000000.0, "finished_at": 1760002115.0094526, "told": false, "replicate_of": null, "replicates": 1}');
INSERT INTO "lora_tune_trial" VALUES('built',1,'finished','pruned',NULL,NULL,'{"number": 1, "seed": 2, "tuned": {"LR": 0.0015187353549301012, "MAX_STEPS": 1200, "layout": "tp1 pp1 cp1 minibs4 mbs1"}, "parameters": {"LR": 0.0015187353549301012, "MAX_STEPS": 1200, "TP": 1, "PP": 1, "CP": 1, "MINIBS": 4, "MBS": 1, "GBS": 32}, "why": "random start", "state": "finished", "verdict": "pruned", "sentence": "stalled: two evals in a row 0.0081 above the median curve; 0.3% of good runs look like this", "seconds": null, "samples": null, "facts": {"samples_per_second": 2.250610829283801, "seconds_per_eval": 34.5, "crossing_low": 6912.0, "eval_samples": 384.0, "pace_spread": 0.0, "init_seconds": 120.0, "evals": 2.0, "last_loss": 0.926145038316672, "last_samples": 6912.0, "node_hours": 0.9083795113033718, "crossing_method": "no falling curve to extend"}, "proposed_at": 1760000000.0, "finished_at": 1760003274.1662407, "told": false, "replicate_of": null, "replicates": 1}');
INSERT INTO "lora_tune_trial" VALUES('built',2,'finished','pruned',NULL,NULL,'{"number": 2, "seed": 3, "tuned": {"LR": 0.0018994741326075896, "MAX_STEPS": 600, "layout": "tp2 pp1 cp1 minibs2 mbs1"}, "parameters": {"LR": 0.0018994741326075896, "MAX_STEPS": 600, "TP": 2, "PP": 1, "CP": 1, "MINIBS": 2, "MBS": 1, "GBS": 8}, "why": "random start", "state": "finished", "verdict": "pruned", "sentence": "stalled: two evals in a row 0.0081 above the median curve; 0.3% of good runs look like this", "seconds": null, "samples": null, "facts": {"samples_per_second": 2.4010701957282063, "seconds_per_eval": 34.5, "crossing_low": 5376.0, "eval_samples": 384.0, "pace_spread": 0.0, "init_seconds": 120.0, "evals": 2.0, "last_loss": 0.9258257635912581, "last_samples": 5376.0, "node_hours": 0.6772226655483246, "crossing_method": "no falling curve to extend"}, "proposed_at": 1760002120.0094526, "finished_at": 1760004562.0110486, "told": false, "replicate_of": null, "replicates": 1}');
INSERT INTO "lora_tune_trial" VALUES('built',3,'running',NULL,NULL,NULL,'{"number": 3, "seed": 4, "tuned": {"LR": 0.0006810987062379428, "MAX_STEPS": 700, "layout": "tp4 pp1 cp1 minibs4 mbs1"}, "parameters": {"LR": 0.0006810987062379428, "MAX_STEPS": 700, "TP": 4, "PP": 1, "CP": 1, "MINIBS": 4, "MBS": 1, "GBS": 8}, "why": "random start", "state": "running", "verdict": null, "sentence": "", "seconds": null, "samples": null, "facts": {}, "proposed_at": 1760003279.1662407, "finished_at": null, "told": false, "replicate_of": null, "replicates": 1}');
CREATE TABLE lora_tune_version (
	version INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "lora_tune_version" VALUES(6);
