//! A daemon whose machines and history are in PostgreSQL: a real server, which is killed, wrong, or another daemon's.

use std::path::Path;

use headwater_testkit::{Postgres, wait_until};

use crate::support::{Daemon, begin, headwater, http, is_alive, run, short_dir};

fn on(url: &str) -> Daemon {
    Daemon::start_in(short_dir(), |command| {
        command.args(["--database", url]);
    })
}

#[test]
fn machines_go_on_while_the_database_is_away_and_all_catches_up() {
    let mut server = Postgres::start(&[]);
    let database = server.new_database();
    let daemon = on(&server.url(&database));
    assert!(!daemon.path().join("headwater.db").exists());
    daemon.with_tiny_machine("ran");
    daemon.create("idle", "tiny", &[]);
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    let pid = daemon.machine("ran")["pid"].as_u64().unwrap();
    let changes = "SELECT string_agg(subject || ': ' || action, ', ' ORDER BY id) FROM events WHERE subject = 'machine ran'";
    assert_eq!(
        server.sql(&database, changes),
        "machine ran: created, machine ran: start, machine ran: state, machine ran: state"
    );

    server.kill();
    assert!(is_alive(pid));
    daemon.console("ran", "w", Some("W"));
    for change in
        [&["machine", "start", "idle"][..], &["machine", "stop", "ran"], &["catalog", "create", "c", "tiny"]]
    {
        daemon.cli(change).fails(1, &["cannot be used now: nothing listens at this address", "try again"]);
    }
    let (_, answer) = begin(&daemon.socket(), "GET", "/api/v1/machines", "");
    let answer = answer.to_lowercase();
    assert!(answer.starts_with("http/1.1 503") && answer.contains("retry-after: 5"), "{answer}");
    // Done all the same, and noted when that is possible.
    let _ = http(
        &daemon.socket(),
        "POST",
        "/api/v1/machines/ran/exec",
        Some(r#"{"argv":["true"],"timeout_ms":1}"#),
    );

    server.restart();
    wait_until("the daemon finds it", || daemon.cli(&["machine", "list"]).code == 0);
    let ran = daemon.machine("ran");
    assert_eq!((&ran["state"], ran["pid"].as_u64()), (&"running".into(), Some(pid)), "{ran}");
    assert_eq!(daemon.machine("idle")["state"], "created");
    wait_until("the history follows", || daemon.history("ran").contains("exec"));
    // A guest that restarts while it is away is started when it is back.
    server.kill();
    daemon.console("ran", "r", None);
    wait_until("it is off", || !is_alive(pid));
    server.restart();
    daemon.wait_for("ran", "running");
    daemon.cli(&["machine", "stop", "ran", "--force"]).ok();
}

#[test]
fn a_second_daemon_is_told_who_has_the_database() {
    let server = Postgres::shared();
    let database = server.new_database();
    let url = server.url(&database);
    let first = on(&url);
    let serve = |dir: &Path, more: &[&str]| {
        run(headwater().args(["serve", "--database", &url, "--data-dir"]).arg(dir).args(more))
    };
    let other = short_dir();
    let named = format!("({})", first.path().display());
    serve(other.path(), &[]).fails(4, &["is used by the daemon of host", &named, "stop that daemon first"]);
    serve(other.path(), &["--take-over-database"]).fails(4, &["is used by the daemon of host"]);
    // The same after a crash goes on at once.
    let dir = first.kill();
    let again = Daemon::start_in(dir, |command| {
        command.args(["--database", &url]);
    });
    // Its host is gone, and its time is over.
    let dir = again.kill();
    server.sql(&database, "UPDATE leases SET until = now() - interval '1 s'");
    serve(other.path(), &[]).fails(4, &["ended without giving it up", "--take-over-database"]);
    let key = dir.path().join("secrets.key").display().to_string();
    let second = Daemon::start_in(other, |command| {
        command.args(["--database", &url, "--take-over-database", "--secrets-key", &key]);
    });
    let (code, other) = second.terminate();
    assert_eq!(code, Some(0));
    // That daemon ended in order, and left the database to others who have the key of its secrets.
    let third = short_dir();
    for _ in 0..2 {
        let missing = serve(third.path(), &[]);
        missing.fails(3, &["secrets.key is missing", "all controllers of one database have the same key"]);
    }
    drop(Daemon::start_in(third, |command| {
        command.args(["--database", &url, "--secrets-key", &key]);
    }));
    drop((dir, other));
}

#[test]
fn a_database_that_cannot_be_meant_is_refused() {
    let dir = short_dir();
    let serve = |args: &[&str]| run(headwater().arg("serve").arg("--data-dir").arg(dir.path()).args(args));
    let secret = "postgres://anna:very-secret@localhost/hw";
    let refused = serve(&["--database", secret]);
    assert!(!refused.err.contains("very-secret"), "{refused:?}");
    refused.fails(2, &["has a password", "--database-password-file"]);
    serve(&["--database", "mysql://h/hw"]).fails(2, &["not a URL of PostgreSQL"]);
    serve(&["--database", "postgres:///hw?host=/nowhere"])
        .fails(1, &["cannot be used now: nothing listens at this address"]);
    let file = dir.path().join("password");
    std::fs::write(&file, "\n").unwrap();
    let file = file.to_str().unwrap();
    serve(&["--database", "postgres:///hw", "--database-password-file", file])
        .fails(2, &["its first line is empty"]);
    assert!(!dir.path().join("headwater.db").exists());
}

#[test]
fn the_password_of_the_database_comes_from_a_file() {
    let server = Postgres::shared();
    let database = server.new_database();
    let role = format!(
        "DO $$ BEGIN CREATE ROLE locked LOGIN PASSWORD 'right'; EXCEPTION WHEN duplicate_object THEN NULL; END $$; ALTER DATABASE {database} OWNER TO locked"
    );
    server.sql("postgres", &role);
    let url = format!("postgres://locked@/{database}?host={}", server.socket_dir().display());
    let dir = short_dir();
    let file = dir.path().join("password");
    std::fs::write(&file, "wrong\n").unwrap();
    let flags = ["--database", &url, "--database-password-file", file.to_str().unwrap()];
    run(headwater().args(["serve", "--data-dir"]).arg(dir.path()).args(flags))
        .fails(1, &["the password is wrong, or missing"]);
    // As the service manager passes it.
    std::fs::write(dir.path().join("database-password"), "right").unwrap();
    let credentials = dir.path().to_owned();
    let daemon = Daemon::start_in(dir, |command| {
        command.args(["--database", &url]).env("CREDENTIALS_DIRECTORY", credentials);
    });
    assert!(!daemon.log.contains("right"), "{}", daemon.log);
}
