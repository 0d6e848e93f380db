//! Machines and daemons that end in the middle of something.

use super::*;

#[tokio::test]
async fn a_stop_that_is_broken_into_says_when_and_does_its_work_once() {
    let fixture = Fixture::new().await;
    fixture.host.deaf.store(true, Ordering::SeqCst);
    fixture.start().await.unwrap();
    let stopping = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.stop_all(false).await }
    });
    fixture.host.button_pressed.notified().await;
    let hurrying = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.stop_all(true).await }
    });
    stopping.await.unwrap();
    hurrying.await.unwrap();
    let reason = fixture.record().await.reason.unwrap();
    assert!(reason.starts_with("it was killed") && reason.contains("after it was asked"), "{reason}");
    let events = fixture.events().await;
    assert_eq!(events.iter().filter(|event| event.action == "stop").count(), 1, "{events:?}");
}
