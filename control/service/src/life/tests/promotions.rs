//! Promotions at a time to come, by a clock that the tests set.

use super::removals::Api;
use super::*;

/// Some day in 2023.
const NOON_MS: u64 = 1_700_000_000_000;

impl Fixture {
    fn set_clock(&self, now_ms: u64) {
        self.host.now_ms.store(now_ms, Ordering::SeqCst);
    }

    /// When the history has promotions that were carried out, and what it says of them.
    async fn promoted(&self) -> Vec<(u64, String, String)> {
        let promoted = self.events().await.into_iter().filter(|event| event.action == "promoted");
        promoted.map(|event| (event.at_ms, event.actor, event.detail)).collect()
    }
}

#[tokio::test]
async fn a_promotion_is_carried_out_once_when_the_clock_has_reached_its_time() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.set_clock(NOON_MS);
    let promote = async |at_ms: u64| {
        let body = format!(r#"{{"channel":"production","at_ms":{at_ms}}}"#);
        api.ask("POST", "images/image@1/promotion", &body).await
    };
    let (status, answer) = promote(NOON_MS - 1).await;
    assert!(status == 400 && answer.contains("2023-11-14 22:13:19Z: that is 1 s ago"), "{answer}");
    let (status, answer) = promote(NOON_MS + 5000).await;
    assert!(status == 200 && answer.contains(r#""at_ms":1700000005000"#), "{answer}");

    fixture.set_clock(NOON_MS + 4999);
    fixture.service.promote_due().await;
    assert_eq!(fixture.promoted().await, []);
    fixture.set_clock(NOON_MS + 5000);
    fixture.service.promote_due().await;
    let promoted = fixture.promoted().await;
    let [(at_ms, actor, detail)] = &promoted[..] else { panic!("{promoted:?}") };
    assert_eq!((*at_ms, &**actor), (NOON_MS + 5000, Actor::daemon().0.as_str()));
    assert!(detail.starts_with("production to version 1, as uid ") && detail.ends_with(" asked"), "{detail}");
    // Set back and on again: it stays the only one.
    for now_ms in [NOON_MS, NOON_MS + 5000] {
        fixture.set_clock(now_ms);
        fixture.service.promote_due().await;
    }
    assert_eq!(fixture.promoted().await, promoted);
}

#[tokio::test]
async fn a_promotion_whose_time_passed_while_nobody_was_there_is_made_up_for_by_the_next_daemon() {
    let mut fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.set_clock(NOON_MS);
    let body = format!(r#"{{"channel":"test","at_ms":{}}}"#, NOON_MS + 1);
    assert_eq!(api.ask("POST", "images/image@1/promotion", &body).await.0, 200);
    fixture.service = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    fixture.set_clock(NOON_MS + 24 * 3600 * 1000);
    let reconciling = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.keep_reconciling().await }
    });
    until("it is carried out", async || fixture.promoted().await.len() == 1).await;
    reconciling.abort();
    assert_eq!(fixture.promoted().await[0].0, NOON_MS + 24 * 3600 * 1000);
}
