//! A controller that is killed while it runs tasks, and the next one on its database.

use std::collections::HashMap;

use axum::http::Method;
use headwater_api::{Filter, ScaleRequest, TaskState};
use headwater_db::repository::EventWindow;
use serde_json::json;
use tokio::runtime::{Builder, Runtime};

use super::schemes::ask;
use super::*;
use crate::tasks::begin_scale;

/// How many tasks run.
const TASKS: u32 = 200;

/// How many machines each makes.
const MACHINES_EACH: u32 = 2;

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Creates catalogs, begins a task for each, and returns when all tasks are noted. From then on, nothing is written.
async fn begin_tasks(fixture: &Fixture) {
    for number in 0..TASKS {
        let catalog = json!({ "name": format!("c{number}"), "image": "image" });
        let (status, answer) = ask(fixture, Method::POST, "/api/v1/catalogs", catalog).await;
        assert_eq!(status, 201, "{answer}");
    }
    for number in 0..TASKS {
        let service = fixture.service.clone();
        let request = ScaleRequest { count: Some(MACHINES_EACH), ..ScaleRequest::default() };
        // Its answer ends with the task.
        tokio::spawn(async move {
            begin_scale(&service, Caller::admin("anna"), format!("c{number}"), request).await.is_ok()
        });
    }
    until("all tasks are noted", async || {
        let tasks = fixture.db.read().await.unwrap().tasks().older(i64::MAX, TASKS).await.unwrap();
        tasks.len() == usize::try_from(TASKS).unwrap()
    })
    .await;
    fixture.db.writes_wait.store(true, Ordering::SeqCst);
}

#[test]
fn another_controller_goes_on_with_two_hundred_tasks_once() {
    let first = runtime();
    let fixture = first.block_on(Fixture::new());
    first.block_on(begin_tasks(&fixture));
    // As a process that is killed: nothing of it goes on.
    first.shutdown_background();
    let Fixture { dir, host, .. } = fixture;

    let second = runtime();
    second.block_on(async {
        let db = FragileDatabase::open(&dir.path().join("db")).await;
        let service = Fixture::service(db.clone(), &host, dir.path());
        let left = service.left_tasks().await.unwrap();
        assert!(!left.is_empty());
        let began = std::time::Instant::now();
        service.recover_tasks(left.clone()).await.unwrap();
        println!("{} of {TASKS} tasks go on after {:?}", left.len(), began.elapsed());
        until("all tasks have ended", async || service.left_tasks().await.unwrap().is_empty()).await;

        let mut repo = db.read().await.unwrap();
        let tasks = repo.tasks().older(i64::MAX, 2 * TASKS).await.unwrap();
        assert_eq!(tasks.len(), usize::try_from(TASKS).unwrap());
        assert!(tasks.iter().all(|task| task.state == TaskState::Done), "{tasks:?}");
        let created = Filter::parse_for_events("action:created machine").unwrap();
        let events = repo.events().page(&created, None, EventWindow::Before(i64::MAX), 10_000).await.unwrap();
        let mut times: HashMap<&str, u32> = HashMap::new();
        for event in events.iter().filter(|event| event.subject.starts_with("machine ")) {
            *times.entry(&event.subject).or_default() += 1;
        }
        assert!(times.values().all(|times| *times == 1), "{times:?}");
        for number in 0..TASKS {
            let machines = repo.machines().of_catalog(&format!("c{number}")).await.unwrap();
            assert_eq!(machines.len(), usize::try_from(MACHINES_EACH).unwrap(), "c{number}");
        }
        assert_eq!(times.len(), usize::try_from(TASKS * MACHINES_EACH).unwrap());
    });
}
