//! Rolls on one host: machines that come up while a roll goes on, and machines that are in use.

use headwater_api::{Batch, Hours, RollReport, RollRequest, TaskResult, TaskState};
use headwater_db::TaskRecord;

use super::claims::class;
use super::*;
use crate::tasks::begin_roll;

/// One canary, then one machine at a time.
fn one_by_one() -> RollRequest {
    RollRequest {
        to: "image@2".to_owned(),
        canary: 1,
        batch: Batch::parse("1").unwrap(),
        pause_s: 0,
        health: None,
        health_s: 60,
        boot_s: 600,
        max_failures: 0,
        at_ms: None,
        window: None,
        wait_idle_s: None,
        message: None,
        deadline_s: None,
    }
}

async fn roll(fixture: &Fixture, request: RollRequest) -> Result<(), headwater_api::Problem> {
    let begun = begin_roll(&fixture.service, Caller::admin("anna"), "class".to_owned(), request).await;
    begun.map(drop).map_err(|failure| failure.0)
}

async fn newest_task(fixture: &Fixture) -> TaskRecord {
    fixture.db.read().await.unwrap().tasks().older(i64::MAX, 1).await.unwrap().remove(0)
}

/// Lets time pass until the roll has ended.
async fn end_of_roll(fixture: &Fixture) -> RollReport {
    until("the roll has ended", async || {
        fixture.pass_ms(10_000);
        newest_task(fixture).await.state.has_ended()
    })
    .await;
    let task = newest_task(fixture).await;
    assert_eq!(task.state, TaskState::Done, "{:?}", task.outcome);
    let result: TaskResult = serde_json::from_str(&task.outcome.unwrap()).unwrap();
    match result {
        TaskResult::Rolled(report) => *report,
        other => panic!("{other:?}"),
    }
}

/// Starts the two machines of a catalog, of which the first one has a user, and makes another version.
async fn class_with_a_user() -> Fixture {
    let fixture = Fixture::new().await;
    class(&fixture, 2, 0).await;
    for name in ["class-1", "class-2"] {
        fixture.service.start(name, &Caller::daemon()).await.unwrap();
    }
    fixture.host.users.lock().unwrap().insert("class-1".to_owned(), 1);
    fixture.host.versions.lock().unwrap().push(version(2, ""));
    fixture
}

#[tokio::test]
async fn a_roll_tells_users_and_waits_until_they_have_left() {
    let fixture = class_with_a_user().await;
    let (wait_idle_s, message) = (Some(6 * 86_400), Some("Save your work: this PC restarts.".to_owned()));
    roll(&fixture, RollRequest { wait_idle_s, message, ..one_by_one() }).await.unwrap();
    let runs = async |name: &str| fixture.service.record(name).await.unwrap().version;
    until("the idle machine is moved", async || runs("class-2").await.as_deref() == Some("image@2")).await;
    let told = || fixture.host.exec_inputs.lock().unwrap().clone();
    assert_eq!(told(), ["Save your work: this PC restarts.\n"]);
    until("its progress says who waits", async || {
        newest_task(&fixture)
            .await
            .progress
            .is_some_and(|text| text.contains("class-1 (1 user; restarted at"))
    })
    .await;
    assert_eq!(runs("class-1").await.as_deref(), Some("image@1"));
    fixture.host.users.lock().unwrap().clear();
    let report = end_of_roll(&fixture).await;
    assert_eq!((report.moved, report.left), (vec!["class-1".to_owned(), "class-2".to_owned()], Vec::new()));
    assert_eq!((told().len(), runs("class-1").await.as_deref()), (1, Some("image@2")));
    let events = fixture.events().await;
    let shown = events.iter().filter(|event| event.action == "message");
    assert_eq!(shown.map(|event| event.subject.as_str()).collect::<Vec<_>>(), ["machine class-1"]);
}

#[tokio::test]
async fn the_deadline_of_a_roll_leaves_machines_to_their_users() {
    let fixture = class_with_a_user().await;
    let (wait_idle_s, deadline_s) = (Some(600), Some(600));
    roll(&fixture, RollRequest { wait_idle_s, deadline_s, ..one_by_one() }).await.unwrap();
    let report = end_of_roll(&fixture).await;
    assert_eq!(report.moved, ["class-2"]);
    assert_eq!(report.left[0].machine, "class-1");
    assert!(report.left[0].why.starts_with("somebody was logged in until the deadline"), "{report:?}");
    let runs = async || fixture.service.record("class-1").await.unwrap().version;
    assert_eq!(runs().await.as_deref(), Some("image@1"));
    // No message was asked for.
    assert!(fixture.host.exec_inputs.lock().unwrap().is_empty());
    fixture.service.reset("class-1", &Caller::daemon()).await.unwrap();
    assert_eq!(runs().await.as_deref(), Some("image@2"));
}

#[tokio::test]
async fn a_message_needs_a_wait_and_a_text() {
    let fixture = class_with_a_user().await;
    let message = Some("Save your work.".to_owned());
    let with =
        |wait_idle_s, message, deadline_s| RollRequest { wait_idle_s, message, deadline_s, ..one_by_one() };
    let at_night = |wait_idle_s, deadline_s| {
        let window = Some(Hours::parse("sun 23:45-00:15 UTC").unwrap());
        RollRequest { window, ..with(Some(wait_idle_s), None, deadline_s) }
    };
    for (request, what) in [
        (at_night(1800, None), "is not shorter than the window"),
        (at_night(3600, Some(1800)), "is not shorter than the window"),
        (with(None, message.clone(), None), "there is a message for users"),
        (with(Some(0), message, None), "there is a message for users"),
        (with(None, None, Some(60)), "there is a deadline for users"),
        (with(Some(60), Some(" ".to_owned()), None), "must have 1 to 1000 characters"),
        (with(Some(60), Some("\u{1b}[2J".to_owned()), None), "no control characters"),
        (with(Some(60), Some("x".repeat(1001)), None), "must have 1 to 1000 characters"),
        (with(Some(8 * 86_400), None, None), "the wait for users is longer than"),
    ] {
        let refused = roll(&fixture, request).await.unwrap_err();
        assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
        assert!(refused.to_string().contains(what), "{refused}");
    }
    assert!(fixture.db.read().await.unwrap().tasks().unended().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_roll_moves_machines_that_come_up_meanwhile() {
    let fixture = Fixture::new().await;
    class(&fixture, 3, 0).await;
    let service = &fixture.service;
    for name in ["class-1", "class-2"] {
        service.start(name, &Caller::daemon()).await.unwrap();
    }
    fixture.host.versions.lock().unwrap().push(version(2, ""));
    roll(&fixture, RollRequest { pause_s: 3600, ..one_by_one() }).await.unwrap();
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
    let task = newest_task(&fixture).await;
    assert_eq!(task.state, TaskState::Done, "{:?}", task.outcome);
}
