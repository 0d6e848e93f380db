//! Notes of versions that are changed: what the history says of it, and who goes away meanwhile.

use super::removals::Api;
use super::*;

impl Fixture {
    /// Who changed notes, and how, as the history has it; the newest comes first.
    async fn noted(&self) -> Vec<(String, String)> {
        let noted = self.events().await.into_iter().filter(|event| event.action == "note changed");
        noted.map(|event| (event.caller, event.detail)).collect()
    }
}

#[tokio::test]
async fn the_history_says_who_changed_a_note_from_what_to_what() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    let hash = fixture.host.versions.lock().unwrap()[0].hash.clone();
    // One that has line breaks is one line of the history all the same.
    let notes = [
        (r"one\ntwo", "from none to 'one two'"),
        ("three", "from 'one two' to 'three'"),
        ("", "from 'three' to none"),
    ];
    for (count, (note, told)) in notes.into_iter().enumerate() {
        let field = format!(r#""note":"{note}""#);
        let body = format!("{{{field}}}");
        let (status, answer) = api.ask("POST", "images/image@1/note", &body).await;
        // No note is no field.
        assert_eq!((status, answer.contains(&field)), (200, !note.is_empty()), "{answer}");
        let noted = fixture.noted().await;
        let (caller, detail) = &noted[0];
        assert!(noted.len() == count + 1 && caller.starts_with("uid "), "{noted:?}");
        assert_eq!(*detail, format!("version 1, {hash}, {told}"));
        // The same once more is no change.
        assert_eq!(api.ask("POST", "images/image@1/note", &body).await.0, 200);
        assert_eq!(fixture.noted().await, noted);
    }
    assert_eq!(fixture.host.versions.lock().unwrap()[0].note, "");
    let last = fixture.events().await.into_iter().find(|event| event.action == "note changed");
    assert_eq!(last.unwrap().change, headwater_api::Change::of("note", "three", serde_json::Value::Null));
}

#[tokio::test]
async fn a_note_of_what_is_no_version_is_refused() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    for (image, body, kind) in [
        ("image", r#"{"note":"one"}"#, ProblemKind::Invalid),
        ("image:test", r#"{"note":"one"}"#, ProblemKind::Invalid),
        // Nobody takes a note away by leaving it out.
        ("image@1", "{}", ProblemKind::Invalid),
        ("image@2", r#"{"note":"one"}"#, ProblemKind::NotFound),
        ("other@1", r#"{"note":"one"}"#, ProblemKind::NotFound),
    ] {
        let (status, answer) = api.ask("POST", &format!("images/{image}/note"), body).await;
        assert_eq!(status, kind.http_status(), "{image}: {answer}");
    }
    assert_eq!(fixture.noted().await, []);
}

#[tokio::test]
async fn a_note_whose_client_hangs_up_is_changed_and_in_the_history() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.host.removals_wait.store(true, Ordering::SeqCst);
    let client = api.send("POST", "images/image@1/note", r#"{"note":"one"}"#).await;
    fixture.host.removal_waits.notified().await;
    drop(client);
    // The server has seen that it is gone when it answers somebody who came later.
    assert_eq!(api.ask("GET", "machines", "").await.0, 200);
    fixture.host.removal_goes_on.notify_one();
    assert!(fixture.service.operations_ended(Duration::from_secs(60)).await);
    assert_eq!(fixture.noted().await.len(), 1);
    assert_eq!(fixture.host.versions.lock().unwrap()[0].note, "one");
}
