//! Subcommands and options of `headwater size`, which lists the sizes of virtual machines in Azure that can hold an
//! OS disk. `headwater scheme` shares some of them.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueHint};
use headwater_block::size;
use headwater_sizes::{Generation, OsDiskPlace};

/// `headwater size ...`.
#[derive(Debug, Subcommand)]
pub enum SizeCommand {
    /// List the sizes that can hold an OS disk, with its place, the space that is left, IOPS and MB/s; then say why
    /// others cannot
    #[command(
        after_help = "Without --sizes, the table of 135 sizes of Azure that is part of the program is asked; it says its source \
                            and date. Rates are the most that a size does at that place. '-' is unknown. If no size holds the \
                            disk, the exit code is 2."
    )]
    Advise(AdviseArgs),
}

/// `headwater size advise`.
#[derive(Debug, Args)]
pub struct AdviseArgs {
    /// The image
    #[command(flatten)]
    pub image: ImageArgs,
    /// The least number of vCPUs
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=65_536), default_value_t = 1)]
    pub vcpus: u32,
    /// The least memory
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "0")]
    pub memory: u64,
    /// Where the OS disk may be, best place first: cache, temp, nvme (all on the host and lost with it), managed (a
    /// disk across the network)
    #[arg(long, value_name = "PLACE,..", value_parser = place(), value_delimiter = ',', default_value = "cache,temp,nvme")]
    pub places: Vec<OsDiskPlace>,
    /// Only sizes that hold the whole image twice on the host, so that its machines do not depend on remote storage
    #[arg(long)]
    pub full_copy: bool,
    /// Only sizes that leave this much of the temp disk, or of all NVMe disks together, for page file and scratch
    /// space
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "0")]
    pub temp_left: u64,
    /// With trusted launch, which takes 1 GiB beside the OS disk and needs generation 2
    #[arg(long)]
    pub trusted_launch: bool,
    /// Show all sizes that can hold it, and every reason of every other size
    #[arg(long)]
    pub all: bool,
    /// Another table of sizes
    #[command(flatten)]
    pub table: TableArgs,
}

/// The facts of the image that machines boot.
#[derive(Clone, Copy, Debug, Args)]
pub struct ImageArgs {
    /// The size of the OS disk, in whole GiB: 127G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub os_disk: u64,
    /// The generation of the image: 1 boots by BIOS, 2 by UEFI [default: not checked]
    #[arg(long, value_name = "1|2", value_parser = generation())]
    pub generation: Option<Generation>,
}

/// The table of sizes.
#[derive(Debug, Args)]
pub struct TableArgs {
    /// A table of sizes with the same columns, instead of the built-in one
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub sizes: Option<PathBuf>,
}

/// Parses a place; shells complete it.
pub fn place() -> impl TypedValueParser<Value = OsDiskPlace> {
    let words = OsDiskPlace::ALL.map(OsDiskPlace::word);
    PossibleValuesParser::new(words).try_map(|word| OsDiskPlace::parse(&word))
}

fn generation() -> impl TypedValueParser<Value = Generation> {
    PossibleValuesParser::new(["1", "2"]).try_map(|word| Generation::parse(&word))
}
