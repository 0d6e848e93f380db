//! Runs the fake services of Azure for clients in other languages: prints the URL, and ends when its standard input
//! ends.

use std::io;

use headwater_testkit_azure::arm::{ArmServer, Size};

#[tokio::main]
async fn main() {
    let server = ArmServer::start().await;
    {
        let mut management = server.management();
        management.retry_after_s = Some(0);
        management.replication_looks = 0;
        management.sizes.push(Size::new("Standard_D8ds_v5", "standardDDSv5Family", 8, "ResourceDisk"));
    }
    println!("{}", server.url);
    // Whether it ends or fails, nobody uses the server any more.
    let _ = tokio::task::spawn_blocking(|| io::copy(&mut io::stdin(), &mut io::sink())).await;
}
