//! Machines that are made, and what is theirs alone.

use super::removals::Api;
use super::*;
use crate::backend::Random;

/// Random numbers of which the first UUIDs have the same last three bytes, which make the MAC.
struct Repeating(Mutex<u32>);

impl Random for Repeating {
    fn fill(&self, bytes: &mut [u8]) -> std::io::Result<()> {
        SystemRandom.fill(bytes)?;
        let mut left = self.0.lock().unwrap();
        if let ([_, _, _, _, _, _, _, _, _, _, _, _, _, mac @ ..], 1..) = (bytes, *left)
            && mac.len() == 3
        {
            mac.copy_from_slice(&[1, 2, 3]);
            *left -= 1;
        }
        Ok(())
    }
}

#[tokio::test]
async fn a_mac_that_another_machine_has_is_not_a_name_that_is_taken() {
    let mut fixture = Fixture::new().await;
    fixture.service = Service::new(Parts {
        db: fixture.db.clone(),
        images: Arc::new(OneImage(fixture.host.clone())),
        disks: Arc::new(FakeDisks(fixture.host.clone())),
        hypervisor: Arc::new(FakeHypervisor(fixture.host.clone())),
        clock: Arc::new(SystemClock),
        // The UUIDs of two machines.
        random: Arc::new(Repeating(Mutex::new(2))),
        data_dir: fixture.dir.path().to_owned(),
        host: super::own_host(),
    });
    let api = Api::serve(&fixture).await;
    for name in ["one", "two"] {
        let body = format!(r##"{{"name":"{name}","image":"image","user_data":"#!/bin/sh {name}"}}"##);
        let (status, answer) = api.ask("POST", "machines", &body).await;
        assert_eq!(status, 201, "{answer}");
        let record = fixture.service.record(name).await.unwrap();
        assert_eq!(record.mac == "52:54:00:01:02:03", name == "one", "{record:?}");
        assert_eq!(record.mac, crate::identity::mac_of(record.uuid));
        assert_eq!(record.identity.host_name, name);
        assert_eq!(record.identity.user_data, Some(format!("#!/bin/sh {name}")));
    }
    let (status, answer) = api.ask("POST", "machines", r#"{"name":"two","image":"image"}"#).await;
    assert_eq!(status, ProblemKind::Conflict.http_status());
    assert!(answer.contains("there is one already"), "{answer}");
}
