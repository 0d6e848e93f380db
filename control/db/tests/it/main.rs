//! One suite, on both databases, and what is particular to each.

mod audit;
mod clouds;
mod hosts;
mod personality;
mod postgres;
mod schemes;
mod sqlite;
mod suite;

/// A test of each case on each database.
macro_rules! suite {
    ($($case:ident $($shared:ident)?),* $(,)?) => {
        mod on_sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let (_dir, db) = crate::sqlite::fresh().await;
                crate::suite::$case(suite!(@ db $($shared)?)).await;
            })*
        }

        mod on_postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let (_name, db) = crate::postgres::fresh().await;
                crate::suite::$case(suite!(@ db $($shared)?)).await;
            })*
        }
    };
    (@ $db:ident) => { &$db };
    (@ $db:ident shared) => { std::sync::Arc::new($db) };
}

suite!(
    machines_are_stored_whole,
    an_event_keeps_what_it_changed,
    the_audit_is_a_chain,
    lists_are_ordered_as_people_count,
    a_name_is_given_once,
    state_is_updated,
    pins_are_set_and_taken_away,
    catalogs_say_what_their_machines_boot,
    disks_are_kept_once,
    a_dropped_unit_of_work_did_nothing,
    events_are_numbered_and_filtered,
    events_are_read_forward,
    tokens_are_found_by_their_hash,
    scopes_are_stored,
    schemes_have_versions,
    lists_are_of_the_scopes_of_a_caller,
    a_machine_has_one_claim,
    the_longest_unused_console_session_gives_way,
    the_newest_runs_of_each_catalog_are_kept,
    tasks_are_kept_until_they_end_and_long_after,
    writers_take_turns shared,
    no_event_is_missed_while_others_write shared,
    a_failed_unit_is_not_saved_and_says_so,
    a_writer_reads_what_the_one_before_it_saved shared,
    a_reader_sees_one_state,
    machines_are_listed_in_pages,
    events_and_tasks_are_filtered,
    hosts_have_names_and_certificates_of_their_own,
    there_is_one_authority_of_nodes,
    a_join_token_is_forgotten_after_its_end,
    what_a_machine_boots_is_replaced,
    keys_have_an_age,
    personality_strings_are_replaced,
    connections_are_stored_whole,
    published_versions_are_kept_until_removed,
    cloud_operations_are_kept_until_they_end,
    machines_in_clouds_have_no_host,
);
