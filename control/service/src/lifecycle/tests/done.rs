//! What was done and cannot be told in full: it is no failure, which would have it done again.

use super::removals::Api;
use super::*;

#[tokio::test]
async fn what_was_noted_is_no_failure_where_it_cannot_be_shown() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    let pin = r#"{"version":"image@1"}"#;
    for (method, path, body, status, told) in [
        ("PUT", "machines/lab/pin", pin, 200, r#""pin":"image@1""#),
        ("DELETE", "machines/lab/pin", "", 200, r#""name":"lab""#),
        ("POST", "catalogs", r#"{"name":"ward","image":"image"}"#, 201, r#""name":"ward""#),
        ("PUT", "catalogs/ward/pin", pin, 200, r#""pin":"image@1""#),
        ("DELETE", "catalogs/ward/pin", "", 200, r#""name":"ward""#),
        ("PATCH", "catalogs/ward", r#"{"image":"image:test"}"#, 200, r#""image":"image:test""#),
    ] {
        let before = fixture.events().await.len();
        fixture.db.fails_after_write.store(true, Ordering::SeqCst);
        let answer = api.ask(method, path, body).await;
        assert!(fixture.db.fails.swap(false, Ordering::SeqCst), "{method} {path} wrote nothing: {answer:?}");
        assert!(answer.0 == status && answer.1.contains(told), "{method} {path}: {answer:?}");
        assert_eq!(fixture.events().await.len(), before + 1, "{method} {path}");
    }
}
