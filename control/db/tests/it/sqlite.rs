//! What is particular to SQLite's file.

use headwater_db::sqlite::SqliteDatabase;
use headwater_db::{Database, DbError, SECRETS_KEY_BYTES, SchemeRecord, Secret, Secrets, SecretsKey};

use crate::suite;

pub(crate) async fn fresh() -> (tempfile::TempDir, SqliteDatabase) {
    let dir = tempfile::tempdir().unwrap();
    let db = SqliteDatabase::open(&dir.path().join("headwater.db")).await.unwrap();
    db.unlock(suite::key()).await.unwrap();
    (dir, db)
}

#[tokio::test]
async fn what_was_saved_is_there_after_reopening() {
    let (dir, db) = fresh().await;
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&suite::machine("kept")).await.unwrap();
    repo.save().await.unwrap();
    db.close().await;
    let db = SqliteDatabase::open(&dir.path().join("headwater.db")).await.unwrap();
    db.unlock(suite::key()).await.unwrap();
    let kept = db.read().await.unwrap().machines().by_name("kept").await.unwrap();
    assert_eq!(kept, Some(suite::machine("kept")));
}

#[tokio::test]
async fn a_copy_is_whole_while_others_write() {
    use headwater_db::sqlite;

    let (dir, db) = fresh().await;
    let from = dir.path().join("headwater.db");
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&suite::machine("saved")).await.unwrap();
    repo.save().await.unwrap();
    // A change that is under way is in no copy, and waits for none.
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&suite::machine("not saved")).await.unwrap();
    let to = dir.path().join("copy.db");
    assert_eq!(sqlite::copy(&from, &to).await.unwrap(), sqlite::known_format());
    repo.save().await.unwrap();
    let copy = SqliteDatabase::open(&to).await.unwrap();
    copy.unlock(suite::key()).await.unwrap();
    let mut repo = copy.read().await.unwrap();
    assert_eq!(repo.machines().by_name("saved").await.unwrap(), Some(suite::machine("saved")));
    assert_eq!(repo.machines().list().await.unwrap().len(), 1);
    drop(repo);
    copy.close().await;
    // A copy takes the place of nothing.
    let full = sqlite::copy(&from, &to).await.unwrap_err();
    assert!(std::error::Error::source(&full).unwrap().to_string().contains("already exists"), "{full:?}");
    let mut bytes = std::fs::read(&to).unwrap();
    let half = bytes.len() / 2;
    bytes[half..].fill(0xa5);
    std::fs::write(&to, bytes).unwrap();
    assert!(sqlite::check(&to).await.is_err());
    assert!(sqlite::copy(&dir.path().join("none"), &dir.path().join("x")).await.is_err());
}

/// How often a text is in the files of a database.
fn found(dir: &tempfile::TempDir, what: &str) -> usize {
    let files = std::fs::read_dir(dir.path()).unwrap();
    let bytes = files.map(|file| std::fs::read(file.unwrap().path()).unwrap());
    let what = what.as_bytes();
    bytes.map(|bytes| bytes.windows(what.len()).filter(|part| *part == what).count()).sum()
}

#[tokio::test]
async fn nothing_of_a_removed_machine_can_be_read_any_more() {
    let (dir, db) = fresh().await;
    let public = "the public host key of that machine";
    let mut gone = suite::machine("gone");
    gone.identity.ssh_host_key_public = public.to_owned();
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&suite::machine("kept")).await.unwrap();
    repo.machines().add(&gone).await.unwrap();
    repo.save().await.unwrap();
    assert!(found(&dir, public) > 0, "it is somewhere else");
    let mut repo = db.write().await.unwrap();
    repo.machines().remove(gone.uuid).await.unwrap();
    repo.save().await.unwrap();
    // At once, and not only at the end of the daemon.
    assert_eq!(found(&dir, public), 0);
    db.close().await;
    assert_eq!(found(&dir, public), 0);
}

#[tokio::test]
async fn the_files_of_a_database_reveal_no_secret() {
    let (dir, db) = fresh().await;
    let (key, text, word) =
        ("the private host key", "the password in the user data", "the catalog's password");
    let mut machine = suite::machine("m");
    machine.ssh_host_key_private = Secret::new(key.to_owned());
    // More than a page of the file.
    machine.identity.user_data = Some(text.repeat(1000));
    let mut catalog = suite::catalog("c");
    catalog.user_data = Some(word.to_owned());
    let signing = headwater_db::AuthorityRecord { key: "signs".repeat(3), certificate: "public".to_owned() };
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&machine).await.unwrap();
    repo.catalogs().add(&catalog).await.unwrap();
    repo.hosts().add_authority(&signing).await.unwrap();
    let cloud = crate::clouds::connection("prod");
    repo.clouds().add(&cloud).await.unwrap();
    let later = "the password of the next version";
    let scheme = SchemeRecord {
        catalog: "c".to_owned(),
        version: 2,
        settings: catalog.settings().with_user_data(Some(later.to_owned())),
        created_by: "uid 0".to_owned(),
        created_at_ms: 1,
    };
    repo.catalogs().add_scheme(&scheme).await.unwrap();
    (catalog.scheme, catalog.user_data) = (2, Some(later.to_owned()));
    repo.save().await.unwrap();
    let client = "a client secret";
    let secrets = [key, text, word, later, &signing.key, client];
    assert_eq!(secrets.map(|secret| found(&dir, secret)), [0; 6]);
    assert!(found(&dir, &machine.identity.ssh_host_key_public) > 0, "the database is somewhere else");
    db.close().await;
    assert_eq!(secrets.map(|secret| found(&dir, secret)), [0; 6]);

    // Without the key, or with another one, everything but the secrets is there.
    let path = dir.path().join("headwater.db");
    let other = || SecretsKey::new(&[8; SECRETS_KEY_BYTES]).unwrap();
    let db = SqliteDatabase::open(&path).await.unwrap();
    assert!(db.has_key().await.unwrap());
    let refused = db.unlock(other()).await.unwrap_err();
    assert!(matches!(refused, DbError::OtherSecretsKey { .. }), "{refused}");
    assert!(refused.to_string().contains("headwater.db are encrypted with another key"), "{refused}");
    assert_eq!(db.read().await.unwrap().machines().list().await.unwrap().len(), 1);
    let unread = db.read().await.unwrap().machines().by_name("m").await.unwrap_err();
    assert!(matches!(unread, DbError::NoSecretsKey), "{unread}");
    let unstored = db.write().await.unwrap().machines().add(&suite::machine("n")).await.unwrap_err();
    assert!(matches!(unstored, DbError::NoSecretsKey), "{unstored}");

    // The other key counts after it was changed.
    db.unlock(suite::key()).await.unwrap();
    assert_eq!(db.rotate(&other()).await.unwrap(), 6);
    db.close().await;
    let db = SqliteDatabase::open(&path).await.unwrap();
    assert!(matches!(db.unlock(suite::key()).await, Err(DbError::OtherSecretsKey { .. })));
    db.unlock(other()).await.unwrap();
    let mut repo = db.read().await.unwrap();
    assert_eq!(repo.machines().by_name("m").await.unwrap(), Some(machine));
    assert_eq!(repo.catalogs().list().await.unwrap(), [catalog]);
    assert_eq!(repo.catalogs().schemes("c").await.unwrap(), [scheme]);
    assert_eq!(repo.hosts().authority().await.unwrap(), Some(signing));
    assert_eq!(repo.clouds().by_name("prod").await.unwrap(), Some(cloud));
}

#[tokio::test]
async fn a_secret_that_was_copied_to_another_row_is_refused() {
    use sqlx::ConnectOptions as _;

    let (dir, db) = fresh().await;
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&suite::machine("a")).await.unwrap();
    repo.machines().add(&suite::machine("b")).await.unwrap();
    repo.save().await.unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.path().join("headwater.db"));
    let copy = "UPDATE machines SET ssh_host_key_private = (SELECT ssh_host_key_private FROM machines WHERE name = 'a')
         WHERE name = 'b'";
    sqlx::query(copy).execute(&mut options.connect().await.unwrap()).await.unwrap();
    let mut repo = db.read().await.unwrap();
    assert!(repo.machines().by_name("a").await.unwrap().is_some());
    let refused = repo.machines().by_name("b").await.unwrap_err();
    assert!(matches!(refused, DbError::Damaged(_)), "{refused}");
    assert!(refused.to_string().contains("machines.ssh_host_key_private of"), "{refused}");
}

#[tokio::test]
async fn an_event_whose_change_is_damaged_is_shown_without_it() {
    use headwater_api::Change;
    use headwater_db::NewEvent;
    use sqlx::ConnectOptions as _;

    let (dir, db) = fresh().await;
    let change = Change::of("cpus", 1, 2);
    let mut repo = db.write().await.unwrap();
    for subject in ["machine a", "machine b", "machine c"] {
        let event = suite::event(subject, "x");
        repo.events().append(NewEvent { change: change.clone(), ..event }).await.unwrap();
    }
    repo.save().await.unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.path().join("headwater.db"));
    let damage = "UPDATE events SET change = substr(change, 1, 9) WHERE subject = 'machine b'";
    sqlx::query(damage).execute(&mut options.connect().await.unwrap()).await.unwrap();
    let events = db.read().await.unwrap().events().newest(None, 9).await.unwrap();
    let shown: Vec<_> = events.into_iter().map(|event| (event.subject, event.change)).collect();
    let expected = [("machine c", change.clone()), ("machine b", None), ("machine a", change)];
    assert_eq!(shown, expected.map(|(subject, change)| (subject.to_owned(), change)));
}

#[tokio::test]
async fn old_events_are_forgotten() {
    use headwater_db::NewEvent;
    use headwater_db::repository::{KEPT_ACTIONS, KEPT_EVENTS};
    use sqlx::ConnectOptions as _;

    let (dir, db) = fresh().await;
    let path = dir.path().join("headwater.db");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path);
    let mut beside = options.connect().await.unwrap();
    // In place of a hundred thousand events, their numbers are gone through in three leaps.
    for last in [0, 999, KEPT_EVENTS - 1, KEPT_EVENTS + 998] {
        sqlx::query("UPDATE sqlite_sequence SET seq = ? WHERE name = 'events'")
            .bind(last)
            .execute(&mut beside)
            .await
            .unwrap();
        let mut repo = db.write().await.unwrap();
        for caller in ["uid 0", "daemon"] {
            let event = suite::event("machine a", "x");
            repo.events().append(NewEvent { caller: caller.to_owned(), ..event }).await.unwrap();
        }
        repo.save().await.unwrap();
    }
    let newest = KEPT_EVENTS + 1000;
    let left = async || {
        let events = db.read().await.unwrap().events().older(None, newest + 1, 99).await.unwrap();
        events.iter().map(|event| event.id).collect::<Vec<i64>>()
    };
    // The daemon's first one is gone, and nothing that somebody did.
    assert_eq!(left().await, [newest, newest - 1, KEPT_EVENTS + 1, KEPT_EVENTS, 1001, 1000, 1]);
    sqlx::query(
        "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)
         INSERT INTO events (at_ms, caller, subject, action, detail) SELECT 5, 'uid 0', 'image a', 'x', '' FROM numbers",
    )
    .bind(KEPT_ACTIONS)
    .execute(&mut beside)
    .await
    .unwrap();
    sqlx::query("UPDATE sqlite_sequence SET seq = ? WHERE name = 'events'")
        .bind(newest + KEPT_ACTIONS + 999)
        .execute(&mut beside)
        .await
        .unwrap();
    let mut repo = db.write().await.unwrap();
    repo.events().append(suite::event("machine a", "x")).await.unwrap();
    repo.save().await.unwrap();
    assert_eq!(left().await, [newest, newest - 1, KEPT_EVENTS + 1, KEPT_EVENTS]);
}

#[tokio::test]
async fn a_change_of_the_history_breaks_the_chain() {
    use headwater_api::audit::{self, AuditCheck};
    use sqlx::ConnectOptions as _;

    let (dir, db) = fresh().await;
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.path().join("headwater.db"));
    let mut beside = options.connect().await.unwrap();
    let check = async || {
        let events = db.read().await.unwrap().events().audit(0, 99).await.unwrap();
        let lines = events.iter().map(|(event, hash)| audit::line(hash, &audit::text_of(event)));
        let mut check = AuditCheck::default();
        lines.into_iter().try_for_each(|line| check.add(&line)).map(|()| check.is_whole)
    };
    let columns = "at_ms caller subject action detail change chain".split(' ');
    let changes = columns.map(|column| {
        let value = match column {
            "at_ms" => "at_ms + 1".to_owned(),
            "change" => r#"'{"before":{},"after":{}}'"#.to_owned(),
            "chain" => "NULL".to_owned(),
            column => format!("{column} || 'x'"),
        };
        format!("UPDATE events SET {column} = {value} WHERE id = (SELECT MIN(id) + 1 FROM events)")
    });
    for change in changes.chain(["DELETE FROM events WHERE id = (SELECT MIN(id) + 1 FROM events)".to_owned()])
    {
        let mut repo = db.write().await.unwrap();
        for _ in 0..3 {
            repo.events().append(suite::event("image a", "x")).await.unwrap();
        }
        repo.save().await.unwrap();
        assert!(check().await.is_ok());
        sqlx::query(sqlx::AssertSqlSafe(change.clone())).execute(&mut beside).await.unwrap();
        assert!(check().await.is_err(), "{change}");
        sqlx::query("DELETE FROM events").execute(&mut beside).await.unwrap();
    }
}

#[tokio::test]
async fn a_file_that_is_no_database_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("headwater.db");
    std::fs::write(&path, "this is no database, and longer than a header of one hundred bytes".repeat(20))
        .unwrap();
    let error = SqliteDatabase::open(&path).await.unwrap_err();
    assert!(matches!(error, DbError::Open { .. }));
    assert!(error.to_string().contains("headwater.db"), "{error}");
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("not a database") && cause.contains("backup"), "{cause}");
    assert!(std::fs::read(&path).unwrap().starts_with(b"this is no database"));
}

#[test]
fn a_private_key_does_not_reach_a_log() {
    assert!(!format!("{:?}", suite::machine("m")).contains("private\""));
}
