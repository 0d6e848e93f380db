//! The API by an HTTP client over the real daemon's socket.

use crate::support::{self, Daemon, headwater, http, run};
use headwater_db::sqlite::SqliteDatabase;
use headwater_db::{Database, NewEvent};
use serde_json::{Value, json};

fn parse(answer: &str) -> Value {
    serde_json::from_str(answer).unwrap_or_else(|e| panic!("{answer:?} is no JSON: {e}"))
}

#[test]
fn every_failure_is_a_problem_with_the_right_status() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    let create = |change: Value| {
        let mut body = json!({"name": "new", "image": "tiny"});
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        ("POST", "/api/v1/machines", Some(body.to_string()))
    };
    let cases = [
        (("GET", "/api/v1/nothing", None), 404, "not_found"),
        (("PUT", "/api/v1/machines", None), 405, "invalid"),
        (("GET", "/api/v1/machines/nobody", None), 404, "not_found"),
        (("GET", "/api/v1/images/none", None), 404, "not_found"),
        (("GET", "/api/v1/images/tiny@9", None), 404, "not_found"),
        (("GET", "/api/v1/images/tiny@zz", None), 400, "invalid"),
        (("GET", "/api/v1/images/..%2F..%2Fetc", None), 400, "invalid"),
        (("POST", "/api/v1/images/none/verify", None), 404, "not_found"),
        (("POST", "/api/v1/machines", Some("{".to_owned())), 400, "invalid"),
        (create(json!({"name": "Odd_Name"})), 400, "invalid"),
        (create(json!({"name": "lab"})), 409, "conflict"),
        (create(json!({"image": "none"})), 404, "not_found"),
        (create(json!({"memroy_bytes": 1})), 400, "invalid"),
        (create(json!({"memory_bytes": 1u64 << 60})), 400, "invalid"),
        (create(json!({"cpus": 0})), 400, "invalid"),
        (create(json!({"cache": {"mode": "tape"}})), 400, "invalid"),
        (create(json!({"cache": {"ram_bytes": 1u64 << 60}})), 400, "invalid"),
        (create(json!({"cache": {"ram_bytes": 1}})), 400, "invalid"),
        (create(json!({"cache": {"disk_bytes": 0}})), 400, "invalid"),
        (create(json!({"host_name": "a b"})), 400, "invalid"),
        (create(json!({"user_data": "hello"})), 400, "invalid"),
        (("POST", "/api/v1/machines/lab/stop?forse=true", None), 400, "invalid"),
        (("POST", "/api/v1/machines/nobody/start", None), 404, "not_found"),
        (("GET", "/api/v1/machines/lab/console/attach", None), 400, "invalid"),
        (("POST", "/api/v1/machines/lab/exec", Some(r#"{"argv":["true"]}"#.to_owned())), 409, "conflict"),
        (("POST", "/api/v1/machines/lab/exec", Some(r#"{"argv":[]}"#.to_owned())), 400, "invalid"),
    ];
    for ((method, path, body), status, kind) in cases {
        let (got, answer) = http(&daemon.socket(), method, path, body.as_deref());
        let problem = parse(&answer);
        assert_eq!((got, &problem["kind"]), (status, &kind.into()), "{method} {path} {body:?}: {answer}");
        assert!(!problem["message"].as_str().unwrap().is_empty());
    }
    let (_, machines) = http(&daemon.socket(), "GET", "/api/v1/machines", None);
    assert_eq!(parse(&machines)["machines"].as_array().unwrap().len(), 1, "a refused machine was created");
}

#[test]
fn a_machine_has_an_identity_of_its_own_and_a_history() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("one");
    let body = json!({"name": "two", "image": "tiny@1", "host_name": "web", "user_data": "#cloud-config\n"});
    let (status, answer) = http(&daemon.socket(), "POST", "/api/v1/machines", Some(&body.to_string()));
    assert_eq!(status, 201, "{answer}");
    let (one, two) = (daemon.machine("one"), parse(&answer));
    assert!(one["mac"].as_str().unwrap().starts_with("52:54:00:"));
    for field in ["uuid", "mac"] {
        assert_ne!(one[field], two[field]);
    }
    assert_ne!(one["identity"]["machine_id"], two["identity"]["machine_id"]);
    assert_eq!(
        (&two["identity"]["host_name"], &one["identity"]["host_name"]),
        (&"web".into(), &"one".into())
    );
    assert!(!answer.contains("PRIVATE KEY"));
    // Stopping what is off changes nothing.
    let (status, answer) = http(&daemon.socket(), "POST", "/api/v1/machines/two/stop", None);
    assert_eq!((status, &parse(&answer)["state"]), (200, &"created".into()));
    let (status, _) = http(&daemon.socket(), "DELETE", "/api/v1/machines/two", None);
    assert_eq!(status, 204);
    let (_, events) = http(&daemon.socket(), "GET", "/api/v1/events?subject=machine%20two", None);
    let events = parse(&events)["events"].clone();
    let actions: Vec<&str> =
        events.as_array().unwrap().iter().map(|event| event["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["removed", "created"]);
    assert!(events[0]["caller"].as_str().unwrap().starts_with("uid "));
}

/// A history of so many events.
fn write_events(database: &std::path::Path, count: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let database = SqliteDatabase::open(database).await.unwrap();
        let mut repo = database.write().await.unwrap();
        for at_ms in 0..count {
            let (caller, subject, detail) = ("daemon".into(), "machine old".into(), String::new());
            let event = NewEvent { at_ms, caller, subject, action: "state".into(), detail, change: None };
            repo.events().append(event).await.unwrap();
        }
        repo.save().await.unwrap();
        database.close().await;
    });
}

#[test]
fn the_history_is_given_in_pages() {
    let dir = support::short_dir();
    write_events(&dir.path().join("headwater.db"), 1200);
    let daemon = Daemon::start_in(dir, |_| {});
    let get = |query: &str| {
        let (status, answer) = http(&daemon.socket(), "GET", &format!("/api/v1/events?{query}"), None);
        (status, parse(&answer))
    };
    let ids = |list: &Value| -> Vec<i64> {
        list["events"].as_array().unwrap().iter().map(|event| event["id"].as_i64().unwrap()).collect()
    };
    let (status, first) = get("limit=1000");
    let first = ids(&first);
    assert_eq!((status, first.len()), (200, 1000));
    let (_, second) = get(&format!("limit=1000&before={}", first[999]));
    let all = [first.clone(), ids(&second)].concat();
    assert!(all.len() >= 1200 && all.is_sorted_by(|a, b| a > b), "{} events", all.len());

    let (status, problem) = get("limit=1001");
    assert_eq!((status, &problem["kind"]), (400, &"invalid".into()), "{problem}");
    assert!(problem["advice"].as_str().unwrap().contains("before=ID"), "{problem}");

    // People ask once.
    let shown = |args: &[&str]| daemon.cli(&[&["events", "--json"], args].concat()).ok();
    assert_eq!(ids(&parse(&shown(&["--limit", "50000"]))), all);
    assert_eq!(ids(&parse(&shown(&["--limit", "1001"]))), all[..1001]);
    let before = all[1000].to_string();
    assert_eq!(ids(&parse(&shown(&["--before", &before]))), all[1001..1101]);
    let two = daemon.cli(&["events", "--limit", "2"]);
    assert_eq!(two.err, format!("for older events: --before {}\n", all[1]));
}

#[test]
fn the_daemon_describes_itself() {
    let daemon = Daemon::start();
    let (status, served) = http(&daemon.socket(), "GET", "/api/v1/openapi.json", None);
    assert_eq!(status, 200);
    let checked_in = include_str!("../../../docs/openapi.json");
    assert_eq!(parse(&served), parse(checked_in), "docs/openapi.json is not what the daemon serves");
    let (_, status) = http(&daemon.socket(), "GET", "/api/v1/status", None);
    assert_eq!(parse(&status)["pid"], daemon.pid());
}

#[test]
fn tcp_is_served_on_request_to_who_has_the_token_but_not_to_web_pages() {
    use std::io::{Read, Write};
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.args(["--listen", "127.0.0.1:0"]);
    });
    let (_, after) = daemon.log.split_once("http://127.0.0.1:").expect("it says where it listens");
    let port: String = after.chars().take_while(char::is_ascii_digit).collect();
    let address = format!("127.0.0.1:{port}");
    let ask = |headers: &str| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        let request = format!("GET /api/v1/machines HTTP/1.1\r\nconnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let token_file = daemon.path().join("api.token");
    let token = std::fs::read_to_string(&token_file).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(token_file).unwrap().permissions());
    assert_eq!((mode & 0o777, token.trim_end().len()), (0o600, 64));
    let token = format!("authorization: Bearer {}\r\n", token.trim_end());
    assert!(ask(&format!("host: {address}\r\n{token}")).starts_with("HTTP/1.1 200"));
    for wrong in ["", "authorization: Bearer 0123\r\n", "authorization: Basic cm9vdDpyb290\r\n"] {
        let refused = ask(&format!("host: {address}\r\n{wrong}"));
        assert!(
            refused.starts_with("HTTP/1.1 401") && refused.contains("www-authenticate: Bearer"),
            "{refused}"
        );
        assert!(
            refused.contains("\"unauthorized\"") && refused.contains("headwater token create"),
            "{refused}"
        );
    }
    assert!(ask(&format!("host: evil.example\r\n{token}")).starts_with("HTTP/1.1 400"));
    let with_origin = ask(&format!("host: {address}\r\norigin: http://evil.example\r\n{token}"));
    assert!(with_origin.starts_with("HTTP/1.1 400"));
}

/// A token for one catalog works on that alone: the command line shows nothing else, and names the scope that another thing needs.
#[test]
fn a_token_for_one_catalog_sees_and_changes_that_alone() {
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.args(["--listen", "127.0.0.1:0"]);
    });
    let disk = daemon.path().join("tiny.raw");
    std::fs::write(&disk, support::tiny_disk()).unwrap();
    daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    for catalog in ["class", "office"] {
        daemon.cli(&["catalog", "create", catalog, "tiny", "--cache", "ram", "--count", "2"]).ok();
    }
    let create = |more: &[&str]| daemon.cli(&[&["token", "create", "anna", "--role"], more].concat());
    create(&["operator", "--catalog", "No Name"]).fails(2, &["'No Name' is neither the name of"]);
    create(&["operator", "--image", "tiny@1"]).fails(2, &["a scope has no version"]);
    create(&["metrics", "--catalog", "class"]).fails(2, &["the role metrics cannot be limited by scopes"]);
    let token = create(&["operator", "--catalog", "cl*"]).ok();
    assert!(daemon.cli(&["token", "list"]).ok().contains("catalog:cl*"));

    let (_, after) = daemon.log.split_once("http://127.0.0.1:").expect("it says where it listens");
    let port: String = after.chars().take_while(char::is_ascii_digit).collect();
    let anna = |args: &[&str]| {
        let mut command = headwater();
        command.args(args).env("XDG_CONFIG_HOME", daemon.path()).env_remove("HEADWATER_DATA_DIR");
        run(&mut command)
    };
    let file = daemon.path().join("anna.token");
    std::fs::write(&file, token).unwrap();
    let url = format!("http://127.0.0.1:{port}");
    let login = anna(&["login", &url, "--token-file", file.to_str().unwrap()]).ok();
    assert!(login.contains("token anna, operator for catalog:cl*"), "{login}");
    let machines = anna(&["machine", "list"]).ok();
    assert!(machines.contains("class-02") && !machines.contains("office"), "{machines}");
    let catalogs = anna(&["catalog", "list"]).ok();
    assert!(catalogs.contains("class") && !catalogs.contains("office"), "{catalogs}");
    let events = anna(&["events"]).ok();
    assert!(events.contains("class") && !events.contains("office") && !events.contains("token"), "{events}");
    anna(&["catalog", "show", "class"]).ok();
    anna(&["status"]).ok();
    let needed = ["token anna is limited to the scope catalog:cl*, but this operation needs catalog:office"];
    anna(&["machine", "show", "office-01"]).fails(1, &needed);
    anna(&["machine", "remove", "office-01"]).fails(1, &needed);
    anna(&["catalog", "scale", "office", "0"]).fails(1, &needed);
    anna(&["machine", "create", "pc", "--catalog", "office"]).fails(1, &needed);
    anna(&["machine", "create", "pc", "tiny"]).fails(1, &["this operation needs image:tiny"]);
    anna(&["image", "list"]).ok();
    anna(&["node", "list"]).fails(1, &["needs a caller without scopes"]);
    anna(&["machine", "create", "pc", "--catalog", "class"]).ok();
    anna(&["catalog", "scale", "class", "0"]).ok();
    let all = daemon.cli(&["machine", "list"]).ok();
    assert!(all.contains("office-01") && all.contains("office-02") && !all.contains("class-0"), "{all}");
}

/// What a named token may do is what its role may: over TCP, from its creation until it ends.
#[test]
fn named_tokens_may_do_what_their_roles_say_until_they_end() {
    use std::io::{Read, Write};
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.args(["--listen", "127.0.0.1:0"]);
    });
    let (_, after) = daemon.log.split_once("http://127.0.0.1:").expect("it says where it listens");
    let port: String = after.chars().take_while(char::is_ascii_digit).collect();
    let address = format!("127.0.0.1:{port}");
    let ask = |token: &str, method: &str, path: &str| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
        stream.write_all(format!("{head}authorization: Bearer {token}\r\n\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status: u16 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer)
    };
    let user_data = daemon.path().join("user-data");
    std::fs::write(&user_data, "#cloud-config\npassword: hunter2\n").unwrap();
    let disk = daemon.path().join("tiny.raw");
    std::fs::write(&disk, support::tiny_disk()).unwrap();
    daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    let user_data = user_data.to_str().unwrap();
    daemon.cli(&["catalog", "create", "class", "tiny", "--cache", "ram", "--user-data", user_data]).ok();
    let make = |name: &str, role: &str| {
        daemon.cli(&["token", "create", name, "--role", role]).ok().trim().to_owned()
    };
    let tokens = ["metrics", "viewer", "operator", "admin"].map(|role| make(&format!("t-{role}"), role));
    // The least role that is let in, by request. A 404 is let in: there is nothing of that name.
    let requests = [
        ("GET", "/metrics", 0),
        ("GET", "/api/v1/status", 1),
        ("GET", "/api/v1/catalogs/class", 1),
        ("POST", "/api/v1/machines/nobody/start", 2),
        ("POST", "/api/v1/tasks/77/cancel", 2),
        ("DELETE", "/api/v1/images/nobody", 3),
        ("GET", "/api/v1/tokens", 3),
    ];
    for (method, path, least) in requests {
        for (rank, token) in tokens.iter().enumerate() {
            let (status, answer) = ask(token, method, path);
            assert_eq!(status != 403, rank >= least, "{method} {path} by {rank}: {answer}");
            assert!(status != 401 && (status != 403 || answer.contains("\"forbidden\"")), "{answer}");
            let sees = answer.contains("hunter2");
            assert_eq!(sees, path.ends_with("class") && rank >= 2, "{path} by {rank}: {answer}");
        }
    }
    let history = daemon.cli(&["events"]).ok();
    let refused = history.lines().find(|line| line.contains("DELETE /api/v1/images/{image}"));
    assert!(
        refused.is_some_and(|line| line.contains("token t-metrics") && line.contains("refused")),
        "{history}"
    );

    let list = daemon.cli(&["token", "list"]).ok();
    assert!(list.contains("t-viewer") && tokens.iter().all(|token| !list.contains(token.as_str())), "{list}");
    daemon.cli(&["token", "create", "t-viewer", "--role", "admin"]).fails(4, &["that name exists"]);
    daemon.cli(&["token", "create", "No Name", "--role", "viewer"]).fails(2, &["No Name"]);
    daemon.cli(&["token", "revoke", "t-viewer"]).ok();
    daemon.cli(&["token", "revoke", "t-viewer"]).fails(3, &["no token 't-viewer'"]);
    let (status, answer) = ask(&tokens[1], "GET", "/api/v1/status");
    assert!(status == 401 && answer.contains("revoked"), "{answer}");
    let short = daemon.cli(&["token", "create", "brief", "--role", "viewer", "--expires", "1s"]).ok();
    headwater_testkit::wait_until("it ends", || ask(short.trim(), "GET", "/api/v1/status").0 == 401);
    assert!(ask(short.trim(), "GET", "/api/v1/status").1.contains("the token 'brief' expired at"));
    // No secret is in a file of the daemon.
    for entry in std::fs::read_dir(daemon.path()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = if path.is_file() { std::fs::read(&path).unwrap() } else { Vec::new() };
        for token in &tokens {
            assert!(!bytes.windows(token.len()).any(|part| part == token.as_bytes()), "{}", path.display());
        }
    }
}

#[test]
fn the_history_is_exported_as_a_chain() {
    let (one, other) = (Daemon::start(), Daemon::start());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("audit.jsonl");
    let path = file.to_str().unwrap();
    one.with_tiny_machine("lab");
    let first: Value = parse(&one.cli(&["audit", "export", path, "--json"]).ok());
    assert_eq!((&first["added"], &first["is_whole"]), (&first["events"], &true.into()), "{first}");
    one.cli(&["machine", "set", "lab", "--ram", "32M"]).ok();
    // An export was killed in the middle of a line.
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, [&whole[..], br#"{"chain":"00"#].concat()).unwrap();
    one.cli(&["audit", "check", path]).fails(6, &["not complete", "audit export"]);
    let second: Value = parse(&one.cli(&["audit", "export", path, "--json"]).ok());
    assert_eq!((&second["added"], &second["first_id"]), (&1.into(), &first["first_id"]), "{second}");
    let text = one.cli(&["audit", "check", path]).ok();
    assert!(text.contains("unchanged") && text.contains(second["hash"].as_str().unwrap()), "{text}");
    // By another program: the one in docs/operations.md.
    let page = include_str!("../../../docs/operations.md");
    let (_, script) = page.split_once("```python\n").unwrap();
    let (script, _) = script.split_once("```").unwrap();
    let python = |file: &str| run(std::process::Command::new("python3").args(["-c", script, file]));
    python(path).ok();

    // A later part, whose first line the daemon knows.
    let part = dir.path().join("part.jsonl");
    let part_path = part.to_str().unwrap();
    let after = second["first_id"].as_i64().unwrap().to_string();
    let later: Value = parse(&one.cli(&["audit", "export", part_path, "--after", &after, "--json"]).ok());
    assert_eq!((&later["is_whole"], &later["hash"]), (&false.into(), &second["hash"]), "{later}");
    one.cli(&["audit", "export", path, "--after", &after]).fails(2, &["the file has events"]);
    one.cli(&["audit", "export", part_path]).ok();
    let text = std::fs::read_to_string(&part).unwrap();
    let (first, rest) = text.split_once('\n').unwrap();
    std::fs::write(&part, format!("{}\n{rest}", first.replace("uid 0", "uid 9"))).unwrap();
    let found = one.cli(&["audit", "check", part_path]).ok();
    assert!(found.contains("unchanged from the second one on"), "{found}");
    one.cli(&["audit", "export", part_path]).fails(6, &["the first line of the file is not event"]);

    // Another history does not continue this one. The file stays as it was.
    let good = std::fs::read_to_string(&file).unwrap();
    other.with_tiny_machine("lab");
    other
        .cli(&["audit", "export", path])
        .fails(6, &["is not event 1 of the daemon's history", "keep this file"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), good);

    std::fs::write(&file, good.replacen("created", "removed", 1)).unwrap();
    one.cli(&["audit", "check", path]).fails(6, &["is not an unchanged audit log", "does not follow"]);
    one.cli(&["audit", "export", path]).fails(6, &["is not an unchanged audit log"]);
    let found = python(path);
    assert!(found.code == 1 && found.err.contains("does not follow the line before it"), "{found:?}");
    one.cli(&["audit", "check", "/nowhere"]).fails(3, &["cannot read /nowhere"]);
}
