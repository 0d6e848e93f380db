//! A firmware that finds nothing to boot.

use super::*;

#[tokio::test]
async fn the_words_of_the_firmware_stay_until_the_machine_boots() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.host.no_boot.send_replace(Some("No bootable device".to_owned()));
    until("the words are noted", async || fixture.record().await.reason.is_some()).await;
    let record = fixture.record().await;
    let reason = record.reason.unwrap();
    assert!(record.state == MachineState::Booting && reason.contains("'No bootable device'"), "{reason}");
    fixture.host.boots.send_replace(true);
    until("it runs", async || fixture.record().await.state == MachineState::Running).await;
    assert_eq!(fixture.record().await.reason, None);
}

#[tokio::test]
async fn a_machine_that_found_nothing_to_boot_is_stopped_without_a_reason() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.host.no_boot.send_replace(Some("No bootable device".to_owned()));
    until("the words are noted", async || fixture.record().await.reason.is_some()).await;
    fixture.stop().await;
    let record = fixture.record().await;
    assert_eq!((record.state, record.reason), (MachineState::Stopped, None));
}
