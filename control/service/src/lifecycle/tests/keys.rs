//! SSH host keys that are replaced when they are too old, and user data that is a template.

use headwater_api::CreateMachine;

use super::claims::class;
use super::*;
use crate::operations::create_machine;

const DAY_MS: u64 = 86_400_000;

#[tokio::test]
async fn a_machine_boots_with_another_key_when_its_key_is_too_old() {
    let fixture = Fixture::new().await;
    class(&fixture, 2, 0).await;
    let mut repo = fixture.db.write().await.unwrap();
    repo.keys().set_rotate_after("class", 30 * 86_400).await.unwrap();
    repo.save().await.unwrap();
    let service = &fixture.service;
    let daemon = Caller::daemon();
    let key = async |name: &str| service.record(name).await.unwrap().identity.ssh_host_key_public;
    let (first, other) = (key("class-1").await, key("class-2").await);

    // The machines were created at the time 0.
    fixture.host.now_ms.store(30 * DAY_MS - 1, Ordering::SeqCst);
    service.start("class-1", &daemon).await.unwrap();
    assert_eq!(key("class-1").await, first);
    fixture.host.now_ms.store(31 * DAY_MS, Ordering::SeqCst);
    service.reset("class-1", &daemon).await.unwrap();
    let second = key("class-1").await;
    assert_ne!(second, first);
    let events = fixture.events().await;
    let said = events.iter().find(|event| event.action == "rotated").unwrap();
    assert!(said.detail.contains("because it was 31 days old") && said.caller == "daemon", "{said:?}");
    // The key is young now. A guest that restarts a month later gets another one.
    service.reset("class-1", &daemon).await.unwrap();
    assert_eq!(key("class-1").await, second);
    fixture.host.now_ms.store(61 * DAY_MS, Ordering::SeqCst);
    fixture.vm().end(VmExit::Rebooted);
    until("it has another key", async || key("class-1").await != second).await;
    assert_eq!(key("class-2").await, other, "a machine that did not boot got another key");
    // A machine without a rule keeps its key.
    let lab = fixture.record().await.identity.ssh_host_key_public;
    fixture.start().await.unwrap();
    assert_eq!(fixture.record().await.identity.ssh_host_key_public, lab);
}

#[tokio::test]
async fn user_data_has_the_values_of_its_machine() {
    let fixture = Fixture::new().await;
    class(&fixture, 0, 0).await;
    let make = async |user_data: &str| {
        let request = serde_json::json!({ "name": "class-07", "catalog": "class", "user_data": user_data });
        let request: CreateMachine = serde_json::from_value(request).unwrap();
        create_machine::make(&fixture.service, &Caller::daemon(), request).await.map_err(|failure| failure.0)
    };
    let refused = make("## template: headwater\n{{ machine.seat }}\n").await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Invalid);
    let text = refused.to_string();
    assert!(text.contains("line 2: 'machine.seat' is unknown") && text.contains("machine.number"), "{text}");
    assert!(fixture.service.record("class-07").await.is_err(), "a machine was made");
    let template = "## template: headwater\n{{ machine.name }} {{ machine.number }} {{ machine.mac }} {{ machine.uuid }}";
    let made = make(template).await.unwrap();
    let expected = format!("class-07 07 {} {}", made.mac, made.uuid);
    let stored = fixture.service.record("class-07").await.unwrap().identity.user_data;
    assert_eq!(stored.as_deref(), Some(&*expected));
}
