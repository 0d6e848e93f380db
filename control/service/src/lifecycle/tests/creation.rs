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
async fn a_machine_gets_another_host_key_when_no_disk_has_the_old_one() {
    let fixture = Fixture::new().await;
    let before = fixture.record().await;
    let api = Api::serve(&fixture).await;
    // Its guest has the key while it is on.
    fixture.service.start("lab", &Caller::daemon()).await.unwrap();
    let (status, answer) = api.ask("POST", "machines/lab/rotate", "").await;
    assert!(status == 409 && answer.contains("machine stop lab"), "{answer}");
    fixture.service.stop("lab", true, &Caller::daemon()).await.unwrap();
    let (status, answer) = api.ask("POST", "machines/lab/rotate", "").await;
    assert_eq!(status, 200, "{answer}");
    let after = fixture.record().await;
    assert_ne!(after.ssh_host_key_private, before.ssh_host_key_private);
    assert_ne!(after.identity.ssh_host_key_public, before.identity.ssh_host_key_public);
    assert!(answer.contains(&after.identity.ssh_host_key_public), "{answer}");
    let both = ssh_key::PrivateKey::from_openssh(after.ssh_host_key_private.reveal()).unwrap();
    assert_eq!(both.public_key().to_openssh().unwrap(), after.identity.ssh_host_key_public);
    // It is the same machine otherwise.
    assert_eq!(
        (after.uuid, &after.mac, &after.identity.machine_id),
        (before.uuid, &before.mac, &before.identity.machine_id)
    );
    let event = fixture.events().await.into_iter().find(|event| event.action == "rotated").unwrap();
    assert!(event.detail.contains("SHA256:") && !event.detail.contains("PRIVATE"), "{event:?}");
    // An edit has the key on its disk, which the seal looks for.
    fixture.edit().await;
    let (status, answer) = api.ask("POST", "machines/lab/rotate", "").await;
    assert!(status == 409 && answer.contains("it edits image 'image'"), "{answer}");
    assert_eq!(fixture.record().await.ssh_host_key_private, after.ssh_host_key_private);
    let (status, _) = api.ask("POST", "machines/nobody/rotate", "").await;
    assert_eq!(status, 404);
}

#[tokio::test]
async fn a_fixed_address_is_given_once_and_only_on_a_bridge() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    let make = async |name: &str, network: &str, ip: &str| {
        let address = format!(r#"{{"ip":"{ip}","prefix":24,"gateway":"10.1.2.1"}}"#);
        let which = format!(r#""name":"{name}","image":"image","network":"{network}""#);
        api.ask("POST", "machines", &format!(r#"{{{which},"address":{address}}}"#)).await
    };
    let (status, answer) = make("one", "user", "10.1.2.31").await;
    assert!(status == 400 && answer.contains("needs a network card on a bridge"), "{answer}");
    let (status, answer) = make("one", "bridge:br0", "10.1.2.255").await;
    assert!(status == 400 && answer.contains("no machine can have the address 10.1.2.255/24"), "{answer}");
    let (status, answer) = make("one", "bridge:br0", "10.1.2.31").await;
    assert_eq!(status, 201, "{answer}");
    let one = fixture.service.record("one").await.unwrap();
    assert_eq!(one.identity.address.unwrap().to_string(), "10.1.2.31/24, gateway 10.1.2.1");
    let (status, answer) = make("two", "bridge:br0", "10.1.2.31").await;
    assert!(status == 409 && answer.contains("machine 'one' already has the address 10.1.2.31"), "{answer}");
    assert!(fixture.service.record("two").await.is_err());
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
    assert!(answer.contains("a machine of that name exists"), "{answer}");
}
