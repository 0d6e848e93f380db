//! What is particular to PostgreSQL: a real server, which is wrong, away, full or another program.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use headwater_db::postgres::{Holder, Place, PostgresDatabase, Taking};
use headwater_db::{Database, DbError, Secrets};
use headwater_testkit::Postgres;

use crate::suite;

/// An empty database on the server that all tests share.
pub(crate) async fn fresh() -> (String, PostgresDatabase) {
    let name = tokio::task::spawn_blocking(|| Postgres::shared().new_database()).await.unwrap();
    let db = open(Postgres::shared(), &name).await.unwrap();
    (name, db)
}

async fn open(server: &Postgres, name: &str) -> Result<PostgresDatabase, DbError> {
    let db = PostgresDatabase::open(Place::parse(&server.url(name)).unwrap()).await?;
    db.unlock(suite::key()).await?;
    Ok(db)
}

async fn refused(url: &str) -> String {
    let error = PostgresDatabase::open(Place::parse(url).unwrap()).await.unwrap_err();
    error.to_string()
}

#[tokio::test]
async fn a_database_of_another_release_is_refused_and_not_changed() {
    let (name, db) = fresh().await;
    db.close().await;
    let server = Postgres::shared();
    let newer = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (1000, 'later', true, '\\x00', 0), (1001, 'later still', true, '\\x00', 0)";
    server.sql(&name, newer);
    let before = server.dump(&name);
    let refused = open(server, &name).await.unwrap_err();
    assert!(refused.to_string().contains("has format 1001; this release reads formats up to 1"), "{refused}");
    assert_eq!(server.dump(&name), before);
    server.sql(&name, "DELETE FROM _sqlx_migrations WHERE version >= 1000");
    server.sql(&name, "UPDATE _sqlx_migrations SET checksum = '\\x00'");
    let refused = open(server, &name).await.unwrap_err();
    assert!(refused.to_string().contains("migration 1 of the database"), "{refused}");
}

#[tokio::test]
async fn what_is_wrong_with_a_server_is_said() {
    let server = Postgres::shared();
    let name = server.new_database();
    let socket = server.socket_dir().display();
    server.sql("postgres", "CREATE ROLE locked LOGIN PASSWORD 'right'");
    server.sql("postgres", &format!("GRANT CREATE ON DATABASE {name} TO locked"));

    let locked = format!("postgres://locked@/{name}?host={socket}");
    let wrong = Place::parse(&locked).unwrap().with_password("wrong");
    let wrong = PostgresDatabase::open(wrong).await.unwrap_err().to_string();
    assert!(wrong.contains("the password is wrong, or missing") && !wrong.contains("right"), "{wrong}");
    let said = refused(&format!("postgres://postgres@/nowhere?host={socket}")).await;
    assert!(said.contains("there is no such database"), "{said}");
    let said = refused(&format!("postgres://postgres@/{name}?host=/nowhere")).await;
    assert!(said.contains("nothing listens at this address"), "{said}");

    server.sql("postgres", &format!("ALTER DATABASE {name} SET default_transaction_read_only = on"));
    let said = refused(&server.url(&name)).await;
    assert!(said.contains("it is read-only"), "{said}");
    server.sql("postgres", &format!("ALTER DATABASE {name} RESET default_transaction_read_only"));

    server.sql("postgres", &format!("ALTER DATABASE {name} CONNECTION LIMIT 0"));
    // An administrator has a connection all the same.
    let right = Place::parse(&locked).unwrap().with_password("right");
    let said = PostgresDatabase::open(right).await.unwrap_err();
    assert!(
        matches!(said, DbError::Away { .. }) && said.to_string().contains("no connection left"),
        "{said}"
    );
    // Nothing was made on the way.
    assert_eq!(server.sql(&name, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"), "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_postgresql_is_said() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let _ = connection.read(&mut [0; 512]);
            let _ = connection.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
        }
    });
    for mode in ["prefer", "require", "disable"] {
        let said = refused(&format!("postgres://a@127.0.0.1:{port}/hw?sslmode={mode}")).await;
        assert!(said.contains("what answers there is not PostgreSQL"), "{mode}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_away_is_said_and_comes_back() {
    let mut server = Postgres::start(&[]);
    let name = server.new_database();
    let db = open(&server, &name).await.unwrap();
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&suite::machine("kept")).await.unwrap();
    repo.save().await.unwrap();

    let mut unsaved = db.write().await.unwrap();
    unsaved.machines().add(&suite::machine("lost")).await.unwrap();
    server.kill();
    let lost = unsaved.save().await.unwrap_err();
    assert!(matches!(lost, DbError::Unsure { .. }), "{lost:?}");
    assert!(lost.to_string().contains("may or may not have been saved"), "{lost}");
    let away = db.read().await.map(drop).unwrap_err();
    assert!(matches!(away, DbError::Away { .. }) && away.to_string().contains("nothing listens"), "{away}");
    assert!(matches!(db.write().await.map(drop), Err(DbError::Away { .. })));

    server.restart();
    let mut repo = db.write().await.unwrap();
    let names: Vec<_> = repo.machines().list().await.unwrap().into_iter().map(|it| it.name).collect();
    assert_eq!(names, ["kept"]);
    repo.machines().add(&suite::machine("new")).await.unwrap();
    repo.save().await.unwrap();
}

#[tokio::test]
async fn connections_that_the_server_ended_are_replaced() {
    let (name, db) = fresh().await;
    drop(db.read().await.unwrap());
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&suite::machine("m")).await.unwrap();
    repo.save().await.unwrap();
    let end = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'");
    Postgres::shared().sql("postgres", &end);
    assert_eq!(db.read().await.unwrap().machines().list().await.unwrap().len(), 1);
    assert!(db.write().await.unwrap().machines().by_name("m").await.unwrap().is_some());
}

#[tokio::test]
async fn an_idle_connection_that_does_not_answer_is_replaced() {
    let (name, db) = fresh().await;
    drop(db.read().await.unwrap());
    // Its server process stands still, as if the network had swallowed the connection.
    let find = format!("SELECT pid FROM pg_stat_activity WHERE datname = '{name}'");
    let found = Postgres::shared().sql("postgres", &find);
    let pids: Vec<&str> = found.split_whitespace().collect();
    assert!(!pids.is_empty());
    let signal = |name: &str| {
        assert!(std::process::Command::new("kill").arg(name).args(&pids).status().unwrap().success());
    };
    signal("-STOP");
    let read = tokio::time::timeout(std::time::Duration::from_secs(40), db.read()).await;
    signal("-CONT");
    assert_eq!(read.expect("it waits for the dead one").unwrap().machines().list().await.unwrap().len(), 0);
}

#[tokio::test]
async fn text_with_the_character_nul_is_kept_with_another_in_its_place() {
    let server = Postgres::shared();
    let db = open(server, &server.new_database()).await.unwrap();
    let mut repo = db.write().await.unwrap();
    repo.events().append(suite::event("machine m", "a\0b")).await.unwrap();
    repo.save().await.unwrap();
    let events = db.read().await.unwrap().events().newest(None, 1).await.unwrap();
    assert_eq!(events[0].detail, "a\u{fffd}b");
}

fn holder(host: &str) -> Holder {
    Holder { id: format!("id of {host}"), name: format!("host {host} (/var/lib/headwater)") }
}

#[tokio::test]
async fn one_daemon_has_a_database_and_a_second_one_is_told_who() {
    let server = Postgres::shared();
    let name = server.new_database();
    let place = Place::parse(&server.url(&name)).unwrap();
    let open =
        async |host: &str, taking| PostgresDatabase::open_for(place.clone(), &holder(host), taking).await;
    let first = open("a", Taking::IfFree).await.unwrap();
    // Nobody renews it here.
    server.sql(&name, "UPDATE leases SET until = now() + interval '1 h'");
    for taking in [Taking::IfFree, Taking::IfOver] {
        let refused = open("b", taking).await.unwrap_err().to_string();
        let is_named = refused.contains("used by the daemon of host a (/var/lib/headwater), for");
        assert!(is_named && refused.contains(" s more"), "{refused}");
    }
    // A copy of its data directory has its id, and another path or host.
    let copy = Holder { name: "host a (/srv/copy)".into(), ..holder("a") };
    let refused =
        PostgresDatabase::open_for(place.clone(), &copy, Taking::IfOver).await.unwrap_err().to_string();
    assert!(refused.contains("used by the daemon of host a (/var/lib/headwater)"), "{refused}");
    // Its time is over, and it may be away only.
    server.sql(&name, "UPDATE leases SET until = now() - interval '1 s'");
    let refused = open("b", Taking::IfFree).await.unwrap_err().to_string();
    assert!(refused.contains("which ended without giving it up"), "{refused}");
    drop(first.write().await.unwrap());
    let second = open("b", Taking::IfOver).await.unwrap();
    let lost = first.write().await.map(drop).unwrap_err().to_string();
    assert!(lost.contains("was taken over by the daemon of host b"), "{lost}");
    assert!(first.read().await.is_ok());
    // In order: anybody may have it now.
    second.end_lease().await.unwrap();
    open("c", Taking::IfFree).await.unwrap();
    assert!(second.write().await.is_err());
    // A daemon that takes over from itself, as after a crash, does so at once; the process before it changes nothing any more.
    let before = open("c", Taking::IfFree).await.unwrap();
    let after = open("c", Taking::IfFree).await.unwrap();
    assert!(before.write().await.is_err() && after.write().await.is_ok());
}

#[tokio::test]
async fn a_lease_is_renewed_until_another_daemon_has_it() {
    let server = Postgres::shared();
    let name = server.new_database();
    let place = Place::parse(&server.url(&name)).unwrap();
    let first = PostgresDatabase::open_for(place.clone(), &holder("a"), Taking::IfFree).await.unwrap();
    let renewing = first.clone();
    let keeper = tokio::spawn(async move { renewing.keep_lease(None).await });
    let over = "UPDATE leases SET until = '2000-01-01'";
    server.sql(&name, over);
    while server.sql(&name, "SELECT until > now() FROM leases").trim() != "t" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // As if the first one had stood still for longer than the lease lasts.
    let second = async {
        loop {
            server.sql(&name, over);
            match PostgresDatabase::open_for(place.clone(), &holder("b"), Taking::IfOver).await {
                Ok(second) => return second,
                Err(error) => assert!(matches!(error, DbError::Held { .. }), "{error}"),
            }
        }
    };
    let _second = second.await;
    let lost = keeper.await.unwrap().to_string();
    assert!(lost.contains("was taken over by the daemon of host b"), "{lost}");
}

#[tokio::test]
async fn a_unit_that_began_before_a_take_over_is_saved_before_it() {
    let server = Postgres::shared();
    let name = server.new_database();
    let place = Place::parse(&server.url(&name)).unwrap();
    let first = PostgresDatabase::open_for(place.clone(), &holder("a"), Taking::IfFree).await.unwrap();
    first.unlock(suite::key()).await.unwrap();
    let mut unit = first.write().await.unwrap();
    let again = holder("a");
    let mut taking =
        tokio::spawn(async move { PostgresDatabase::open_for(place, &again, Taking::IfFree).await });
    assert!(tokio::time::timeout(std::time::Duration::from_millis(200), &mut taking).await.is_err());
    unit.machines().add(&suite::machine("in time")).await.unwrap();
    unit.save().await.unwrap();
    let second = taking.await.unwrap().unwrap();
    second.unlock(suite::key()).await.unwrap();
    assert!(second.read().await.unwrap().machines().by_name("in time").await.unwrap().is_some());
    assert!(first.write().await.is_err());
}
