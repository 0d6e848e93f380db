//! Versions that are removed: while somebody uses them, while the store does not answer, by a client that hangs up.

use headwater_api::ProblemKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::*;
use crate::server::{bind_unix, serve_unix};

/// The API of a service, until this is dropped.
pub(super) struct Api {
    socket: PathBuf,
    _stop: watch::Sender<bool>,
}

impl Api {
    pub(super) async fn serve(fixture: &Fixture) -> Self {
        let socket = fixture.dir.path().join("api.sock");
        let listener = bind_unix(&socket).await.unwrap();
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(serve_unix(listener, crate::operations::router(fixture.service.clone()), stopped));
        Self { socket, _stop: stop }
    }

    /// Sends a request, and does not wait for the answer.
    pub(super) async fn send(&self, method: &str, path: &str, body: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.socket).await.unwrap();
        let len = body.len();
        let head = format!("{method} /api/v1/{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
        let request = format!("{head}content-type: application/json\r\ncontent-length: {len}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// The answer's status and text.
    pub(super) async fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = self.send(method, path, body).await;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
    }
}

#[tokio::test]
async fn a_version_is_not_removed_while_the_store_cannot_say_who_boots_it() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    // The machine boots it, which only the store knows.
    *fixture.host.unreadable.lock().unwrap() = Some("image".to_owned());
    let (status, answer) = api.ask("DELETE", "images/image@1", "").await;
    assert_eq!(status, ProblemKind::Failed.http_status(), "{answer}");
    assert_eq!(fixture.host.versions.lock().unwrap().len(), 1);
    // Nor is a report of its damage lost for that.
    let (status, answer) = api.ask("POST", "images/image@1/verify", "").await;
    assert!(status == 200 && answer.contains("chunk 0"), "{answer}");
    assert!(answer.contains("image@1: cannot determine who uses it: not in this test"), "{answer}");
    *fixture.host.unreadable.lock().unwrap() = None;
    let (status, answer) = api.ask("DELETE", "images/image@1", "").await;
    assert_eq!(status, ProblemKind::Conflict.http_status(), "{answer}");
    assert!(answer.contains("machine 'lab' boots it"), "{answer}");
}

#[tokio::test]
async fn an_image_that_a_machine_runs_is_not_removed_when_it_will_boot_another() {
    let fixture = Fixture::new().await;
    fixture.in_catalog().await;
    fixture.start().await.unwrap();
    let mut repo = fixture.db.write().await.unwrap();
    repo.catalogs().set_image("lab", "other").await.unwrap();
    repo.save().await.unwrap();
    let api = Api::serve(&fixture).await;
    for what in ["image", "image@1"] {
        let (status, answer) = api.ask("DELETE", &format!("images/{what}"), "").await;
        assert_eq!(status, ProblemKind::Conflict.http_status(), "{answer}");
        assert!(answer.contains("machine 'lab' runs it"), "{answer}");
    }
    fixture.service.stop("lab", true, &Caller::daemon()).await.unwrap();
    assert_eq!(api.ask("DELETE", "images/image", "").await.0, 200);
}

#[tokio::test]
async fn an_image_goes_with_its_channels_where_that_is_asked_for_and_no_machine_boots_it() {
    let fixture = Fixture::new().await;
    *fixture.host.production.lock().unwrap() = Some(1);
    let api = Api::serve(&fixture).await;
    let conflict = ProblemKind::Conflict.http_status();
    let (status, answer) = api.ask("DELETE", "images/image?force=true", "").await;
    assert!(status == conflict && answer.contains("machine 'lab' boots it"), "{answer}");
    fixture.service.remove("lab", true, &Caller::daemon()).await.unwrap();
    for unforced in ["images/image", "images/image?force=false"] {
        let (status, answer) = api.ask("DELETE", unforced, "").await;
        assert!(status == conflict && answer.contains("production points to"), "{answer}");
    }
    // Channels are of the image.
    let (status, answer) = api.ask("DELETE", "images/image@1?force=true", "").await;
    assert!(status == 400 && answer.contains("names one version"), "{answer}");
    assert_eq!(fixture.host.versions.lock().unwrap().len(), 1);
    let (status, answer) = api.ask("DELETE", "images/image?force=true", "").await;
    assert_eq!(status, 200, "{answer}");
    assert!(fixture.host.versions.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_machine_runs_no_version_of_another_image_with_the_same_bytes() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    let uses = async |image: &str| {
        let found = ImageVersion { image: image.to_owned(), ..version(1, "") };
        let reference = ImageRef::parse(&format!("{image}@1")).unwrap();
        crate::uses::of(&fixture.service, &reference, Some(&found)).await.unwrap()
    };
    assert_eq!(uses("image").await, ["machine 'lab' runs it"]);
    assert_eq!(uses("other").await, [] as [&str; 0]);
}

#[tokio::test]
async fn a_removal_that_fails_half_way_is_in_the_history() {
    let fixture = Fixture::new().await;
    fixture.host.versions.lock().unwrap().push(version(2, ""));
    fixture.host.removals_fail.store(true, Ordering::SeqCst);
    let api = Api::serve(&fixture).await;
    assert_eq!(api.ask("DELETE", "images/image@1", "").await.0, ProblemKind::Failed.http_status());
    let events = fixture.events().await;
    let tried = events.iter().find(|event| event.action == "removal tried").unwrap();
    assert!(tried.subject == "image image" && tried.caller.starts_with("uid "), "{tried:?}");
    assert!(tried.detail.starts_with("image@1; it may or may not have been done"), "{tried:?}");
    // One that was not there was not tried.
    assert_eq!(api.ask("DELETE", "images/image@1", "").await.0, 404);
    assert_eq!(fixture.events().await.len(), events.len());
}

#[tokio::test]
async fn a_removal_whose_client_hangs_up_goes_on_and_is_in_the_history() {
    let fixture = Fixture::new().await;
    fixture.host.versions.lock().unwrap().push(version(2, ""));
    let api = Api::serve(&fixture).await;
    fixture.host.removals_wait.store(true, Ordering::SeqCst);
    let client = api.send("DELETE", "images/image@1", "").await;
    fixture.host.removal_waits.notified().await;
    drop(client);
    // The server has seen that it is gone when it answers somebody who came later.
    let (status, _) = api.ask("GET", "machines", "").await;
    assert_eq!(status, 200);
    // An orderly end waits for it.
    assert!(!fixture.service.operations_ended(Duration::ZERO).await);
    fixture.host.removal_goes_on.notify_one();
    assert!(fixture.service.operations_ended(Duration::from_secs(60)).await);
    let mut repo = fixture.db.read().await.unwrap();
    let events = repo.events().newest(Some("image image"), 10).await.unwrap();
    assert!(events.iter().any(|event| event.action == "removed" && event.detail == "image@1"));
    assert_eq!(fixture.host.versions.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_boot_trace_that_changes_while_its_client_hangs_up_changes_in_the_history_too() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.host.removals_wait.store(true, Ordering::SeqCst);
    for (method, path, body, action) in [
        ("POST", "images/image/trace/merge", r#"{"source":"/trace"}"#, "boot trace merged"),
        ("DELETE", "images/image/trace", "", "boot trace removed"),
    ] {
        let client = api.send(method, path, body).await;
        fixture.host.removal_waits.notified().await;
        drop(client);
        // As above.
        assert_eq!(api.ask("GET", "machines", "").await.0, 200);
        fixture.host.removal_goes_on.notify_one();
        assert!(fixture.service.operations_ended(Duration::from_secs(60)).await);
        let events = fixture.events().await;
        assert!(events.iter().any(|event| event.action == action), "{action}: {events:?}");
    }
}

#[tokio::test]
async fn what_waits_for_the_store_holds_nobody_else_up() {
    let fixture = Fixture::persistent().await;
    fixture.second_machine().await;
    let api = Api::serve(&fixture).await;
    let (status, answer) = api.ask("POST", "catalogs", r#"{"name":"ward","image":"image"}"#).await;
    assert_eq!(status, 201, "{answer}");
    let pin = r#"{"version":"image@1"}"#;
    let changes = [
        ("image@1", "POST", "machines", r#"{"name":"bed","image":"image@1"}"#),
        ("image@1", "POST", "catalogs", r#"{"name":"hall","image":"image@1"}"#),
        ("image@1", "PATCH", "catalogs/ward", r#"{"image":"image@1"}"#),
        ("image@1", "PUT", "catalogs/ward/pin", pin),
        ("image@1", "PUT", "machines/lab/pin", pin),
        ("image@1", "POST", "machines/lab/start", ""),
        ("image:maintenance", "POST", "images/image/edit", r#"{"machine":"desk"}"#),
        ("image@1", "DELETE", "images/image@1", ""),
    ];
    for (reference, method, path, body) in changes {
        *fixture.host.hangs_on.lock().unwrap() = Some(reference.to_owned());
        let mut stream = api.send(method, path, body).await;
        let mut answer = String::new();
        tokio::select! {
            () = fixture.host.resolve_waits.notified() => {}
            _ = stream.read_to_string(&mut answer) => panic!("{method} {path} asked for nothing: {answer}"),
        }
        let event = fixture.service.event(&Caller::daemon(), "daemon".to_owned(), "test", path);
        let noted = fixture.service.append(event).await;
        assert!(noted.is_ok(), "{method} {path}: {noted:?}");
        fixture.host.resolve_goes_on.notify_one();
        stream.read_to_string(&mut answer).await.unwrap();
        let expected = if method == "DELETE" { "HTTP/1.1 409" } else { "HTTP/1.1 20" };
        assert!(answer.starts_with(expected), "{method} {path}: {answer}");
    }
}

#[tokio::test]
async fn a_version_that_is_being_removed_is_not_pinned() {
    let fixture = Fixture::new().await;
    fixture.host.versions.lock().unwrap().push(version(2, ""));
    let api = Api::serve(&fixture).await;
    fixture.host.removals_wait.store(true, Ordering::SeqCst);
    let mut removal = api.send("DELETE", "images/image@1", "").await;
    fixture.host.removal_waits.notified().await;
    let mut pin = api.send("PUT", "machines/lab/pin", r#"{"version":"image@1"}"#).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    // Others write meanwhile.
    let event = fixture.service.event(&Caller::daemon(), "daemon".to_owned(), "test", "");
    fixture.service.append(event).await.unwrap();
    fixture.host.removal_goes_on.notify_one();
    let (mut removed, mut pinned) = (String::new(), String::new());
    removal.read_to_string(&mut removed).await.unwrap();
    pin.read_to_string(&mut pinned).await.unwrap();
    assert!(removed.starts_with("HTTP/1.1 200"), "{removed}");
    assert!(pinned.starts_with("HTTP/1.1 404"), "{pinned}");
    assert_eq!(fixture.record().await.pin, None);
}

#[tokio::test]
async fn what_many_machines_boot_is_asked_of_the_store_once() {
    let fixture = Fixture::new().await;
    fixture.second_machine().await;
    let api = Api::serve(&fixture).await;
    let (status, answer) = api.ask("DELETE", "images/image@1", "").await;
    assert_eq!(status, ProblemKind::Conflict.http_status(), "{answer}");
    assert!(answer.contains("machine 'desk' boots it; machine 'lab' boots it"), "{answer}");
    let resolved = fixture.host.resolved.lock().unwrap().clone();
    assert_eq!(resolved, ["image@1", "image"]);
}

#[tokio::test]
async fn a_method_that_a_path_does_not_know_is_told_with_those_that_it_knows() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    let (status, answer) = api.ask("PUT", "machines", "").await;
    assert_eq!(status, 405, "{answer}");
    let head = answer.to_lowercase();
    assert!(head.contains("\r\nallow: get,head,post\r\n"), "{answer}");
    assert!(answer.contains(r#""kind":"invalid""#), "{answer}");
}
