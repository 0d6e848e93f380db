//! Rolls on one host: machines that come up while a roll goes on.

use headwater_api::{Batch, RollRequest};

use super::claims::class;
use super::*;
use crate::tasks::begin_roll;

#[tokio::test]
async fn a_roll_moves_machines_that_come_up_meanwhile() {
    let fixture = Fixture::new().await;
    class(&fixture, 3, 0).await;
    let service = &fixture.service;
    for name in ["class-1", "class-2"] {
        service.start(name, &Caller::daemon()).await.unwrap();
    }
    fixture.host.versions.lock().unwrap().push(version(2, ""));
    let request = RollRequest {
        to: "image@2".to_owned(),
        canary: 1,
        batch: Batch::parse("1").unwrap(),
        pause_s: 3600,
        health: None,
        health_s: 60,
        boot_s: 600,
        max_failures: 0,
        at_ms: None,
        window: None,
    };
    let begun = begin_roll(service, Caller::admin("anna"), "class".to_owned(), request).await;
    begun.map_err(|failure| failure.0).unwrap();
    let runs = async |name: &str| service.record(name).await.unwrap().version;
    let new = Some("image@2".to_owned());
    until("the canary is moved", async || runs("class-1").await == new).await;
    let unended = async || fixture.db.read().await.unwrap().tasks().unended().await.unwrap();
    let pause = async || {
        let plan = unended().await.first().and_then(|task| task.plan.clone());
        let plan: Option<serde_json::Value> = plan.map(|plan| serde_json::from_str(&plan).unwrap());
        plan.map_or(u64::MAX, |plan| plan["pause_until_ms"].as_u64().unwrap())
    };
    until("the roll pauses", async || pause().await > 0).await;
    // The catalog means the version from before, so this machine boots it.
    service.start("class-3", &Caller::daemon()).await.unwrap();
    assert_eq!(runs("class-3").await.as_deref(), Some("image@1"));
    for name in ["class-2", "class-3"] {
        let until_ms = pause().await;
        fixture.host.now_ms.store(until_ms + 1, Ordering::SeqCst);
        until("the next machine is moved", async || runs(name).await == new).await;
        until("the roll pauses again, or ends", async || pause().await > until_ms).await;
    }
    until("the roll has ended", async || unended().await.is_empty()).await;
    let task = fixture.db.read().await.unwrap().tasks().older(i64::MAX, 1).await.unwrap().remove(0);
    assert_eq!(task.state, headwater_api::TaskState::Done, "{:?}", task.outcome);
}
