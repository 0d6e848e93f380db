//! A store that does not answer, or late: who waits for it, and how long.

use tokio::io::AsyncReadExt;

use super::removals::Api;
use super::*;
use crate::backend::RetentionPurpose;

#[tokio::test]
async fn a_store_that_does_not_tell_of_edits_keeps_no_daemon_from_starting() {
    let fixture = Fixture::new().await;
    let (edit, _) = fixture.service.edit_image("image", "lab", &Caller::daemon()).await.unwrap();
    fixture.host.away.store(true, Ordering::SeqCst);
    let again = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    // The store answers when this test lets it, which it never does.
    tokio::time::timeout(Duration::from_secs(60), again.recover()).await.unwrap().unwrap();
    assert_eq!(*fixture.host.kept_by_sweep.lock().unwrap(), [edit.id]);
}

#[tokio::test]
async fn what_a_version_is_held_for_is_done_where_its_client_hangs_up() {
    let fixture = Fixture::new().await;
    let host = &fixture.host;
    host.is_shared.store(true, Ordering::SeqCst);
    fixture.second_machine().await;
    let api = Api::serve(&fixture).await;
    assert_eq!(api.ask("POST", "catalogs", r#"{"name":"ward","image":"image"}"#).await.0, 201);
    let pin = r#"{"version":"image@1"}"#;
    for (method, path, body, subject, action) in [
        ("POST", "machines", r#"{"name":"bed","image":"image@1"}"#, "machine bed", "created"),
        ("POST", "catalogs", r#"{"name":"hall","image":"image@1"}"#, "catalog hall", "created"),
        ("PATCH", "catalogs/ward", r#"{"image":"image@1"}"#, "catalog ward", "set"),
        ("PUT", "catalogs/ward/pin", pin, "catalog ward", "pinned"),
        ("PUT", "machines/lab/pin", pin, "machine lab", "pinned"),
        ("POST", "images/image/edit", r#"{"machine":"desk"}"#, "machine desk", "edit"),
    ] {
        host.holds_wait.store(true, Ordering::SeqCst);
        let client = api.send(method, path, body).await;
        host.hold_waits.notified().await;
        host.holds_wait.store(false, Ordering::SeqCst);
        drop(client);
        // The server has seen that it is gone when it answers somebody who came later.
        assert_eq!(api.ask("GET", "machines", "").await.0, 200);
        assert!(!fixture.service.operations_ended(Duration::ZERO).await, "{method} {path}");
        host.hold_goes_on.notify_one();
        assert!(fixture.service.operations_ended(Duration::from_secs(60)).await, "{method} {path}");
        let events = fixture.events().await;
        let is_noted = events.iter().any(|event| event.subject == subject && event.action == action);
        assert!(is_noted, "{method} {path}: {events:?}");
    }
    let held = || host.holds.lock().unwrap().len();
    // The image, which machines and the first catalog follow, once.
    assert_eq!(held(), 8, "{:?}", host.holds.lock().unwrap());
    fixture.service.roots_due().await;
    assert_eq!(held(), 8);
    // What it is let go for, too.
    for (path, subject, action) in [
        ("machines/lab/pin", "machine lab", "unpinned"),
        ("catalogs/ward/pin", "catalog ward", "unpinned"),
        ("catalogs/hall", "catalog hall", "removed"),
    ] {
        fixture.db.writes_wait.store(true, Ordering::SeqCst);
        let client = api.send("DELETE", path, "").await;
        fixture.db.write_waits.notified().await;
        fixture.db.writes_wait.store(false, Ordering::SeqCst);
        drop(client);
        assert_eq!(api.ask("GET", "machines", "").await.0, 200);
        assert!(!fixture.service.operations_ended(Duration::ZERO).await, "{path}");
        fixture.db.write_goes_on.notify_one();
        assert!(fixture.service.operations_ended(Duration::from_secs(60)).await, "{path}");
        let events = fixture.events().await;
        let is_noted = events.iter().any(|event| event.subject == subject && event.action == action);
        assert!(is_noted, "{path}: {events:?}");
    }
    fixture.service.roots_due().await;
    assert_eq!(held(), 5, "{:?}", host.holds.lock().unwrap());
}

#[tokio::test]
async fn a_store_that_somebody_removes_from_is_asked_for_one_hold_and_again_later() {
    const NOON_MS: u64 = 1_700_000_000_000;
    let fixture = Fixture::new().await;
    let host = &fixture.host;
    let set_clock = |now_ms| host.now_ms.store(now_ms, Ordering::SeqCst);
    set_clock(NOON_MS);
    let mut repo = fixture.db.write().await.unwrap();
    for number in 1..=5 {
        let new = crate::identity::make(&SystemRandom, "bed", None).unwrap();
        let (name, image) = (format!("bed{number}"), "image@1".to_owned());
        let record = MachineRecord { uuid: new.uuid, name, mac: new.mac, image, ..fixture.record().await };
        repo.machines().add(&record).await.unwrap();
    }
    repo.save().await.unwrap();
    host.is_shared.store(true, Ordering::SeqCst);
    host.removed_from.store(true, Ordering::SeqCst);
    let asked = || host.holds_asked.load(Ordering::SeqCst);
    fixture.service.roots_changed();
    for _ in 0..2 {
        fixture.service.roots_due().await;
        assert_eq!(asked(), 1);
    }
    // A clock that is set back a day does not make that a day.
    set_clock(NOON_MS - 24 * 3600 * 1000);
    fixture.service.roots_due().await;
    assert_eq!(asked(), 2);
    host.removed_from.store(false, Ordering::SeqCst);
    set_clock(NOON_MS);
    fixture.service.roots_due().await;
    assert_eq!((asked(), host.holds.lock().unwrap().len()), (8, 6));
}

#[tokio::test]
async fn what_a_store_does_not_find_stays_held_and_is_looked_for_again() {
    const NOON_MS: u64 = 1_700_000_000_000;
    let fixture = Fixture::new().await;
    let host = &fixture.host;
    host.now_ms.store(NOON_MS, Ordering::SeqCst);
    host.is_shared.store(true, Ordering::SeqCst);
    let api = Api::serve(&fixture).await;
    assert_eq!(api.ask("PUT", "machines/lab/pin", r#"{"version":"image@1"}"#).await.0, 200);
    let pins =
        || host.holds.lock().unwrap().iter().filter(|root| root.purpose == RetentionPurpose::Pin).count();
    let look = async |after_ms| {
        host.now_ms.store(NOON_MS + after_ms, Ordering::SeqCst);
        fixture.service.roots_due().await;
        pins()
    };
    *host.hidden.lock().unwrap() = Some("image@1".to_owned());
    assert_eq!(look(0).await, 1);
    // Somebody took it away meanwhile.
    host.holds.lock().unwrap().clear();
    assert_eq!(look(60_000).await, 0);
    // It may be gone for good, and is looked for less often.
    *host.hidden.lock().unwrap() = None;
    assert_eq!(look(120_000).await, 0);
    *host.hidden.lock().unwrap() = Some("image@1".to_owned());
    assert_eq!(look(180_000).await, 0);
    *host.hidden.lock().unwrap() = None;
    assert_eq!(look(300_000).await, 0);
    // But not where something changed.
    fixture.service.roots_changed();
    assert_eq!(look(300_000).await, 1);
    // What the database does not name any more goes.
    assert_eq!(api.ask("DELETE", "machines/lab/pin", "").await.0, 200);
    assert_eq!(look(360_000).await, 0);
    // Without a change it is found in the end, too.
    assert_eq!(api.ask("PUT", "machines/lab/pin", r#"{"version":"image@1"}"#).await.0, 200);
    host.holds.lock().unwrap().clear();
    *host.hidden.lock().unwrap() = Some("image@1".to_owned());
    assert_eq!((look(420_000).await, look(480_000).await), (0, 0));
    *host.hidden.lock().unwrap() = None;
    assert_eq!((look(599_999).await, look(600_000).await), (0, 1));
}

/// A machine that is on, and a reset of it that waits for a store that hangs.
async fn hanging_reset(fixture: &Fixture) -> tokio::task::JoinHandle<Result<MachineRecord, LifecycleError>> {
    let uuid = fixture.start().await.unwrap().uuid;
    fixture.host.away.store(true, Ordering::SeqCst);
    let service = fixture.service.clone();
    let reset = tokio::spawn(async move { service.reset("lab", &Caller::daemon()).await });
    until("the reset has the turn", async || fixture.service.at_turn(uuid) == 1).await;
    reset
}

#[tokio::test]
async fn a_guest_is_asked_to_end_with_the_daemon_while_the_store_hangs() {
    let fixture = Fixture::new().await;
    let reset = hanging_reset(&fixture).await;
    fixture.service.begin_stop();
    // The store answers when this test lets it, which it never does.
    tokio::time::timeout(Duration::from_secs(600), fixture.service.stop_all(false)).await.unwrap();
    let given_up = crate::answer::problem(&reset.await.unwrap().unwrap_err());
    assert_eq!(given_up.kind, ProblemKind::Unavailable);
    assert!(given_up.to_string().contains("the daemon is stopping"), "{given_up}");
    assert_eq!(*fixture.host.stops.lock().unwrap(), ["ACPI"]);
    assert_eq!(fixture.record().await.state, MachineState::Stopped);
}

#[tokio::test]
async fn a_machine_is_stopped_by_force_while_the_store_hangs() {
    let fixture = Fixture::new().await;
    let reset = hanging_reset(&fixture).await;
    let daemon = Caller::daemon();
    let stop = fixture.service.stop("lab", true, &daemon);
    let stopped = tokio::time::timeout(Duration::from_secs(600), stop).await.unwrap().unwrap();
    assert_eq!((stopped.state, stopped.wanted), (MachineState::Stopped, Wanted::Stopped));
    let given_up = crate::answer::problem(&reset.await.unwrap().unwrap_err());
    assert!(given_up.to_string().contains("the machine is being stopped by force"), "{given_up}");
    // Nobody waits for its turn any more, and it is started like any other.
    fixture.host.away.store(false, Ordering::SeqCst);
    fixture.start().await.unwrap();
}

#[tokio::test]
async fn a_command_in_a_guest_does_not_hold_up_the_end_of_the_daemon() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.host.boots.send_replace(true);
    fixture.host.execs_hang.store(true, Ordering::SeqCst);
    let api = Api::serve(&fixture).await;
    let mut client = api.send("POST", "machines/lab/exec", r#"{"argv":["sleep"],"timeout_ms":600000}"#).await;
    fixture.host.exec_hangs.notified().await;
    fixture.service.begin_stop();
    let mut answer = String::new();
    let told = tokio::time::timeout(Duration::from_secs(60), client.read_to_string(&mut answer)).await;
    told.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("the daemon is stopping"), "{answer}");
}

#[tokio::test]
async fn a_catalog_that_is_set_to_another_image_meanwhile_is_not_pinned() {
    let fixture = Fixture::new().await;
    fixture.host.is_shared.store(true, Ordering::SeqCst);
    let api = Api::serve(&fixture).await;
    assert_eq!(api.ask("POST", "catalogs", r#"{"name":"ward","image":"image"}"#).await.0, 201);
    fixture.host.holds_wait.store(true, Ordering::SeqCst);
    let mut pinning = api.send("PUT", "catalogs/ward/pin", r#"{"version":"image@1"}"#).await;
    fixture.host.hold_waits.notified().await;
    fixture.host.holds_wait.store(false, Ordering::SeqCst);
    // There is only one image here, so the other one is set where its operation would.
    let mut repo = fixture.db.write().await.unwrap();
    repo.catalogs().set_image("ward", "other").await.unwrap();
    repo.save().await.unwrap();
    fixture.host.hold_goes_on.notify_one();
    let mut answer = String::new();
    pinning.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    let catalog = fixture.db.read().await.unwrap().catalogs().by_name("ward").await.unwrap().unwrap();
    assert_eq!((catalog.image.as_str(), catalog.pin), ("other", None));
    // Nor is it held for that.
    fixture.service.roots_due().await;
    let held: Vec<_> = fixture.host.holds.lock().unwrap().iter().map(|root| root.purpose).collect();
    assert_eq!(held, [RetentionPurpose::Follow; 2], "the image of the machine, and that of the catalog");
}
