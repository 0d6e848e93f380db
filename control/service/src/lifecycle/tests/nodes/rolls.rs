//! A roll over machines of another host that are in use.

use headwater_api::{Batch, RollRequest, TaskState};

use super::*;
use crate::tasks::begin_roll;

#[tokio::test]
async fn users_of_another_host_are_told_and_have_their_time() {
    let pair = Pair::new().await;
    let connection = pair.connect().await;
    pair.class_on("b", 1).await;
    let service = &pair.controller.service;
    until("it starts", async || service.start("class-1", &Caller::daemon()).await.is_ok()).await;
    for fixture in [&pair.controller, &pair.node] {
        fixture.host.versions.lock().unwrap().push(version(2, ""));
        fixture.host.boots.send_replace(true);
    }
    pair.node.host.users.lock().unwrap().insert("class-1".to_owned(), 2);
    let request = RollRequest {
        to: "image@2".to_owned(),
        canary: 1,
        batch: Batch::default(),
        pause_s: 0,
        health: None,
        health_s: 60,
        boot_s: 600,
        max_failures: 0,
        at_ms: None,
        window: None,
        wait_idle_s: Some(1),
        message: Some("Save your work.".to_owned()),
        deadline_s: None,
    };
    let begun = begin_roll(service, Caller::admin("anna"), "class".to_owned(), request).await;
    begun.map_err(|failure| failure.0).unwrap();
    let newest = async || {
        let tasks = pair.controller.db.read().await.unwrap().tasks().older(i64::MAX, 1).await;
        tasks.unwrap().remove(0)
    };
    until("the roll has ended", async || newest().await.state.has_ended()).await;
    let task = newest().await;
    assert_eq!(task.state, TaskState::Done, "{:?}", task.outcome);
    assert_eq!(*pair.node.host.exec_inputs.lock().unwrap(), ["Save your work.\n"]);
    let ran = pair.node.host.opened.lock().unwrap().iter().map(|opened| opened.1).collect::<Vec<_>>();
    assert_eq!(ran, [1, 2]);
    connection.abort();
}
