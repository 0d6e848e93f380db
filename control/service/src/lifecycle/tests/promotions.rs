//! Promotions: at a time to come, by a clock that the tests set, and whose answers are lost.

use serde_json::json;

use super::removals::Api;
use super::*;

/// Some day in 2023.
const NOON_MS: u64 = 1_700_000_000_000;

impl Host {
    /// Points a channel to a version. What it pointed to is known of production alone.
    pub(super) fn promote(
        &self,
        promotion: &Promotion,
    ) -> Result<(Option<u64>, Option<Promotion>), BackendError> {
        let forgets = self.forget_scheduled(promotion.channel);
        let is_production = promotion.channel == Channel::Production;
        let before =
            if is_production { self.production.lock().unwrap().replace(promotion.version) } else { None };
        self.answer()?;
        Ok((before, forgets))
    }

    pub(super) fn forget_scheduled(&self, channel: Channel) -> Option<Promotion> {
        self.scheduled.lock().unwrap().extract_if(.., |it| it.channel == channel).last()
    }

    /// The answer to a change of the store, unless it is lost.
    pub(super) fn answer(&self) -> Result<(), BackendError> {
        let lost = self.answers_lost.load(Ordering::SeqCst);
        let error = BackendError::new(ProblemKind::Failed, "nobody answered").unknown();
        if lost { Err(error) } else { Ok(()) }
    }
}

impl Fixture {
    fn set_clock(&self, now_ms: u64) {
        self.host.now_ms.store(now_ms, Ordering::SeqCst);
    }

    /// When the history has promotions that were carried out, and what it says of them.
    async fn promoted(&self) -> Vec<(u64, String, String)> {
        let promoted = self.events().await.into_iter().filter(|event| event.action == "promoted");
        promoted.map(|event| (event.at_ms, event.caller, event.detail)).collect()
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
    assert!(status == 400 && answer.contains("2023-11-14 22:13:19Z: that time was 1 s ago"), "{answer}");
    let (status, answer) = promote(NOON_MS + 5000).await;
    assert!(status == 200 && answer.contains(r#""at_ms":1700000005000"#), "{answer}");

    fixture.set_clock(NOON_MS + 4999);
    fixture.service.promote_due().await;
    assert_eq!(fixture.promoted().await, []);
    fixture.set_clock(NOON_MS + 5000);
    fixture.service.promote_due().await;
    let promoted = fixture.promoted().await;
    let [(at_ms, caller, detail)] = &promoted[..] else { panic!("{promoted:?}") };
    assert_eq!((*at_ms, &**caller), (NOON_MS + 5000, Caller::daemon().principal.as_str()));
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

#[tokio::test]
async fn a_promotion_says_which_one_to_come_it_took_the_place_of() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.set_clock(NOON_MS);
    fixture.next_version();
    let promote = async |version: u64, at: &str| {
        let body = format!(r#"{{"channel":"production"{at}}}"#);
        let (status, answer) = api.ask("POST", &format!("images/image@{version}/promotion"), &body).await;
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let (sooner, later) = (r#","at_ms":1700000005000"#, r#","at_ms":1700000009000"#);
    let forgets = |version: u64, at: &str| {
        format!(r#""forgets":{{"channel":"production","version":{version}{at},"author":"#)
    };
    assert!(!promote(2, sooner).await.contains("forgets"));
    let answer = promote(1, later).await;
    assert!(answer.contains(&forgets(2, sooner)), "{answer}");
    let answer = promote(1, "").await;
    assert!(answer.contains(&forgets(1, later)), "{answer}");
    // Also where the channel points there already, and no more than that.
    promote(2, sooner).await;
    let answer = promote(1, "").await;
    assert!(answer.contains(&forgets(2, sooner)), "{answer}");
    assert!(!promote(1, "").await.contains("forgets"));
    let events = fixture.events().await;
    let told: Vec<_> = events.iter().rev().map(|event| (event.action.as_str(), &*event.detail)).collect();
    assert_eq!(
        told,
        [
            ("promotion scheduled", "production to version 2 at 2023-11-14 22:13:25Z"),
            (
                "promotion scheduled",
                "production to version 1 at 2023-11-14 22:13:29Z; cancels the promotion to version 2 at 2023-11-14 22:13:25Z"
            ),
            (
                "promoted",
                "production to version 1; cancels the promotion to version 1 at 2023-11-14 22:13:29Z"
            ),
            ("promotion scheduled", "production to version 2 at 2023-11-14 22:13:25Z"),
            (
                "promoted",
                "production stays at version 1; cancels the promotion to version 2 at 2023-11-14 22:13:25Z"
            ),
            ("promoted", "production stays at version 1"),
        ]
    );
}

#[tokio::test]
async fn events_of_scheduled_and_cancelled_promotions_have_what_they_changed() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.set_clock(NOON_MS);
    fixture.next_version();
    for (method, path, body) in [
        ("POST", "images/image@1/promotion", r#"{"channel":"production","at_ms":1700000005000}"#),
        ("POST", "images/image@2/promotion", r#"{"channel":"production","at_ms":1700000005000}"#),
        ("POST", "images/image@1/promotion", r#"{"channel":"production"}"#),
        ("POST", "images/image@2/promotion", r#"{"channel":"test","at_ms":1700000009000}"#),
        ("DELETE", "images/image/promotion?channel=test", ""),
    ] {
        let (status, answer) = api.ask(method, path, body).await;
        assert_eq!(status, 200, "{method} {path}: {answer}");
    }
    let events = fixture.events().await;
    let changes: Vec<_> =
        events.iter().rev().map(|event| serde_json::to_value(&event.change).unwrap()).collect();
    let (version, at) = ("scheduled_production.version", "scheduled_production.at_ms");
    let (test, test_at) = ("scheduled_test.version", "scheduled_test.at_ms");
    let (sooner_ms, later_ms) = (1_700_000_005_000_u64, 1_700_000_009_000_u64);
    let expected = [
        json!({ "before": { version: null, at: null }, "after": { version: 1, at: sooner_ms } }),
        // The time is the same.
        json!({ "before": { version: 1 }, "after": { version: 2 } }),
        json!({
            "before": { "production": null, version: 2, at: sooner_ms },
            "after": { "production": 1, version: null, at: null },
        }),
        json!({ "before": { test: null, test_at: null }, "after": { test: 2, test_at: later_ms } }),
        json!({ "before": { test: 2, test_at: later_ms }, "after": { test: null, test_at: null } }),
    ];
    assert_eq!(changes, expected);
}

#[tokio::test]
async fn a_change_of_the_store_whose_answer_is_lost_is_in_the_history() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.start().await.unwrap();
    let failed = ProblemKind::Failed.http_status();
    let tried = async || {
        let events = fixture.events().await;
        let tried = events.into_iter().filter(|event| event.action.ends_with(" tried"));
        tried.map(|event| (event.subject, event.action, event.detail)).collect::<Vec<_>>()
    };
    // One that was not made was not tried.
    assert_eq!(api.ask("POST", "images/image@1/retire", r#"{"retired":true}"#).await.0, failed);
    assert_eq!(tried().await, []);
    fixture.host.answers_lost.store(true, Ordering::SeqCst);
    assert_eq!(api.ask("POST", "images/image@1/promotion", r#"{"channel":"production"}"#).await.0, failed);
    let control = Arc::new(TaskControl::default());
    let request = headwater_api::SealRequest::default();
    fixture.service.seal_machine("lab", request, &Caller::daemon(), control).await.unwrap_err();
    fixture.service.promote_due().await;
    let unknown = "it may or may not have been done: nobody answered";
    let expected = [
        ("promotion tried", "what was due"),
        ("seal tried", "a version of the disk of machine lab over image@1"),
        ("promotion tried", "production to version 1"),
    ];
    let expected = expected
        .map(|(action, what)| ("image image".to_owned(), action.to_owned(), format!("{what}; {unknown}")));
    assert_eq!(tried().await, expected);
}
