//! `headwater machine trim`: runs fstrim in guests, so that blocks of deleted files are freed in their write caches.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use headwater_api::{DiskCounters, ExecRequest, Problem, ProblemKind};
use headwater_block::size;

use crate::client::Client;
use crate::cmd::machine::Failures;
use crate::show::{self, progress::said_if_slow};

/// Trims one guest after the other. Fails with the first error after all were tried.
pub async fn run(client: &Client, names: Vec<String>, json: bool) -> anyhow::Result<()> {
    let mut failures = Failures::new(json);
    let mut trimmed = Vec::new();
    for name in names {
        match one(client, &name, json).await {
            Ok((before, after)) if json => trimmed
                .push(serde_json::json!({ "machine": name, "before_bytes": before, "after_bytes": after })),
            Ok((before, after)) => show::if_read(show::line(&format!(
                "trimmed {name}: its write cache has {}, and had {} before",
                size::format(after),
                size::format(before)
            )))?,
            Err(e) => failures.add(e),
        }
    }
    if json {
        show::if_read(show::json(&trimmed))?;
    }
    failures.end()
}

/// The bytes in a machine's write cache before and after.
async fn one(client: &Client, name: &str, json: bool) -> anyhow::Result<(u64, u64)> {
    let before = held(client, name).await?;
    // Blocks of files that were deleted last are free only after a sync.
    let argv = ["sh", "-c", "sync && exec fstrim --all"].map(str::to_owned).to_vec();
    let timeout_ms = ExecRequest::default_timeout_ms();
    let request = ExecRequest { argv, timeout_ms, stdin_base64: None };
    let what = format!("waiting for fstrim in the guest of {name}");
    let result = said_if_slow(json, &what, client.exec(name, &request)).await?;
    if result.exit_code != 0 {
        let said = STANDARD.decode(&result.stderr_base64).unwrap_or_default();
        let said = show::printable(String::from_utf8_lossy(&said).trim());
        let message = format!(
            "cannot trim machine '{name}': fstrim failed with exit code {}: {said}",
            result.exit_code
        );
        return Err(Problem::new(ProblemKind::Failed, message).into());
    }
    Ok((before, held(client, name).await?))
}

async fn held(client: &Client, name: &str) -> anyhow::Result<u64> {
    let disk = client.machine(name).await?.disk;
    Ok(disk.map_or(0, |DiskCounters { ram_used_bytes, disk_used_bytes, .. }| {
        ram_used_bytes.saturating_add(disk_used_bytes)
    }))
}
