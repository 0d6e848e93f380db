//! Commands that are about to be checked when another initiator's reservation takes their initiator's access.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use headwater_testkit::ReferenceDisk;

use super::*;
use crate::cdb::ReserveOut;
use crate::identity::Identity;
use crate::task::Attribute;
use crate::unit::Options;

const LUN: Lun = Lun([0; 8]);

fn initiator(name: u8) -> Initiator {
    Initiator { transport_id: Box::new([0x45, 0, 0, name]), target_port: 1, target_port_name: "t".into() }
}

fn unit_on(disk: &Arc<ReferenceDisk>) -> Arc<LogicalUnit> {
    let identity = Identity {
        vendor: "V".into(),
        product: "P".into(),
        revision: "1".into(),
        serial: "1".into(),
        uuid: [1; 16],
    };
    let options = Options { power_on_attention: false, ..Options::default() };
    LogicalUnit::new(Arc::clone(disk) as Arc<dyn headwater_block::Device>, identity, options)
}

/// Registers `who` and reserves the unit for it alone.
fn take(unit: &LogicalUnit, who: &Arc<Initiator>) {
    let key = 7_u64.to_be_bytes();
    let out = |action, kind, list: [[u8; 8]; 3]| {
        let request = ReserveOut { action, scope: 0, kind, list_bytes: 24 };
        unit.reservations.persistent_out(NexusId::next(), who, &request, &list.concat()).unwrap();
    };
    out(0, 0, [[0; 8], key, [0; 8]]);
    out(1, 1, [key, [0; 8], [0; 8]]);
}

/// Sends a command from a thread of its own while the fence is closed, makes a reservation for another
/// initiator, and opens the fence.
fn overtaken(cdb: [u8; 16], data_out: &[u8], at_once: bool) -> (Option<Reply>, Arc<ReferenceDisk>) {
    let disk = Arc::new(ReferenceDisk::new(1 << 20));
    let unit = unit_on(&disk);
    let target = Target::new("t", vec![(0, Arc::clone(&unit))]);
    let nexus = target.nexus(initiator(1));
    let (sender, receiver) = mpsc::channel();
    let (cdb, data_out) = (Cdb::new(&cdb), data_out.to_vec());
    let closed = unit.tasks.close();
    let thread = std::thread::spawn(move || {
        let announced_bytes = data_out.len() as u64;
        if at_once {
            let attribute = Attribute::Simple;
            let command = Command { lun: LUN, attribute, cdb: &cdb, data_out: &data_out, announced_bytes };
            let Now::Done { reply, .. } = nexus.try_now(&command, &mut []) else { panic!("it must wait") };
            sender.send(Some(reply)).unwrap();
        } else {
            let task = Task {
                lun: LUN,
                attribute: Attribute::Simple,
                tag: 1,
                arrival: nexus.arrival(LUN),
                cdb,
                data_out,
                announced_bytes,
                data_in: Vec::new(),
            };
            nexus.execute(task, move |outcome| sender.send(outcome.reply).unwrap());
        }
        nexus
    });
    // Gives the command time to reach the fence. The expected result does not depend on that.
    std::thread::sleep(Duration::from_millis(50));
    take(&unit, &Arc::new(initiator(2)));
    drop(closed);
    let reply = receiver.recv_timeout(Duration::from_secs(30)).unwrap();
    thread.join().unwrap();
    (reply, disk)
}

#[test]
fn a_command_is_looked_at_behind_the_fence() {
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    let write_same = [0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    let mode_select = [0x15, 0x10, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let write_protect = [0, 0, 0, 0, 0x0a, 0x0a, 4, 0x10, 8, 0, 0, 0, 0xff, 0xff, 0, 0];
    let cases: [([u8; 16], &[u8], bool); 5] = [
        (write, &[7; 512], true),
        (write, &[7; 512], false),
        (write_same, &[7; 512], false),
        (mode_select, &write_protect, true),
        (mode_select, &write_protect, false),
    ];
    for (cdb, data_out, at_once) in cases {
        let (reply, disk) = overtaken(cdb, data_out, at_once);
        assert_eq!(reply, Some(control::conflict()), "{cdb:x?}, at once: {at_once}");
        assert!(disk.contents().iter().all(|byte| *byte == 0), "{cdb:x?} wrote, at once: {at_once}");
    }
}
