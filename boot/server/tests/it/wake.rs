//! Wake-on-LAN over a cable between two network namespaces.

use std::time::Duration;

use headwater_boot_server::Mac;
use headwater_boot_server::wake::{magic_packet, wake};

use crate::namespace::{FAR, Far, NEAR, enter, run};

const SENDER: &str = "HEADWATER_TEST_SENDER";
const CARD: Mac = Mac([0x52, 0x54, 0, 0xaa, 0xbb, 0xcc]);

/// The other end of the test below.
#[test]
fn the_sender() {
    if std::env::var_os(SENDER).is_some() {
        wake(FAR, CARD).unwrap();
    }
}

#[test]
fn a_magic_packet_reaches_all_computers_of_the_network() {
    if !enter("wake::a_magic_packet_reaches_all_computers_of_the_network") {
        return;
    }
    let far = Far::connect();
    far.set_address("10.77.0.1/24");
    let listening = headwater_boot_server::interface::udp(NEAR, 9).unwrap();
    listening.set_nonblocking(false).unwrap();
    listening.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let program = std::env::current_exe().unwrap();
    let sent =
        run(far.command(program.to_str().unwrap()).args(["--exact", "wake::the_sender"]).env(SENDER, "1"));
    assert!(sent.contains("1 passed"), "{sent}");
    let mut buffer = [0; 1500];
    let (len, from) = listening.recv_from(&mut buffer).unwrap();
    assert_eq!(buffer[..len], magic_packet(CARD));
    assert_eq!(from.ip().to_string(), "10.77.0.1");
    assert!(wake("nowhere0", CARD).is_err());
}
