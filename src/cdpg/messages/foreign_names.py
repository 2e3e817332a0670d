"""Answers to names of settings from Transformers, TRL and other trainers: what to use here instead."""

from __future__ import annotations

from collections.abc import Iterable

from cdpg.messages.nearest import NEARLY_EQUAL, nearest

_ADAM = "the optimiser is Adam without weight decay, as in the paper; adam_betas and adam_epsilon set it"
_CACHE = "the tuned model samples with its own cache; rows_per_pass sets how many samples it draws side by side"
_COMMAND = "it is for the command line and YAML files; in Python, "
_HUB = "upload the model after the run, with cdpg push RUN REPO_ID or trainer.push_to_hub(repo_id)"
_LAUNCH = (
    "start the program with accelerate launch, which sets up the processes; each of them holds the whole model "
    "unless sharding is full"
)
_LOADER = "contexts are encoded once at the start, without a data loader; contexts_per_epoch are drawn in an epoch"
_LOSS = "method chooses the loss; cdpg settings method lists the methods"
_MEMORY = "use tokens_per_pass (memory grows with the tokens differentiated at once, and hardly with batch_size)"
_SAMPLING = (
    "samples are drawn at temperature 1 from the whole vocabulary, because the weight of a sample is computed from "
    "its probabilities under the unchanged model and base"
)

ANSWERS: tuple[tuple[str, str], ...] = (
    # How long it learns, and how fast.
    (
        "num_train_epochs num_epochs n_epochs max_epochs",
        "use epochs (here an epoch is one round of sampling, not a pass over the data)",
    ),
    ("max_steps total_episodes", "use epochs (here an epoch is one round of sampling)"),
    ("lr", "use learning_rate"),
    ("warmup_steps warmup_ratio num_warmup_steps", "use warmup_epochs"),
    ("lr_scheduler_type lr_scheduler_kwargs", "use warmup_epochs and decay_epochs (the rate is constant between them)"),
    ("optim optim_args optim_target_modules optimizer weight_decay", _ADAM),
    ("adam_beta1 adam_beta2", "use adam_betas (a list of both, such as [0.9, 0.999])"),
    (
        "per_device_train_batch_size train_batch_size mini_batch_size",
        "use batch_size (samples per optimiser step, over all processes)",
    ),
    ("gradient_accumulation_steps", "use tokens_per_pass (micro-batches are cut by tokens, the gradient is exact)"),
    ("steps_per_generation num_mini_batches", "use batch_size (samples per optimiser step; the epoch's by default)"),
    ("num_iterations num_ppo_epochs", "use ziegler_epochs, rft_passes or raft_passes, by the method; cdpg has replay"),
    ("average_tokens_across_devices", "the loss is always a mean over the samples of all processes"),
    ("label_smoothing_factor", "there are no labels: samples are weighted as method says"),
    ("neftune_noise_alpha", "noise in the model would make the recorded probabilities of the samples wrong"),
    ("disable_dropout dropout", "dropout is always off: in sampling, in scoring and in the gradient"),
    # Sampling.
    ("temperature top_p top_k min_p typical_p repetition_penalty num_beams do_sample", _SAMPLING),
    ("generation_kwargs generation_config", _SAMPLING),
    ("max_new_tokens max_length max_tokens response_length generation_max_length", "use max_completion_length"),
    ("max_prompt_length max_seq_length", "use long_contexts (refuse or cut; the limit is the model's own window)"),
    ("num_generations_eval", "use evaluation_samples"),
    ("num_return_sequences", "use num_generations"),
    (
        "generation_batch_size per_device_eval_batch_size eval_accumulation_steps local_rollout_forward_batch_size",
        "use rows_per_pass for sampling and tokens_per_pass for scoring",
    ),
    (
        "generation_num_beams predict_with_generate",
        "the measure of a task says whether evaluations use beam search",
    ),
    ("use_vllm vllm_mode", "use engine: vllm (with engine_url, if it is a server)"),
    ("vllm_server_base_url vllm_server_host vllm_server_port", "use engine: vllm and engine_url"),
    ("vllm_server_timeout", "use engine_seconds"),
    ("vllm_gpu_memory_utilization", "use engine_memory"),
    ("use_transformers_paged cache_implementation use_cache", _CACHE),
    ("use_transformers_continuous_batching transformers_continuous_batching_config", _CACHE),
    ("mask_truncated_completions", "a completion that is cut is judged like any other"),
    (
        "stop stop_strings stop_token stop_token_id missing_eos_penalty",
        "a stop rule is the trainer's argument stop, in Python; a task brings its own",
    ),
    ("pad_to_multiple_of", "rows are padded to the longest of a pass, which tokens_per_pass bounds"),
    (
        "chat_template_kwargs chat_template_path chat_template",
        "set chat_template of the tokenizer, and pass the tokenizer to the trainer as processing_class",
    ),
    ("system_prompt system_message", "use system (with chat: true, or with prompts that are chats)"),
    ("apply_chat_template conversational", "use chat: true (prompts that are lists of messages need no setting)"),
    ("max_tool_calling_iterations tools", "a completion is one answer: there are no calls of tools"),
    # What is asked for.
    (
        "reward_weights multi_objective_aggregation",
        "constraints are multiplied; to let one count for more, have it return its value raised to a power",
    ),
    (
        "scale_rewards whiten_rewards",
        "values in [0, 1] are not scaled; cdpg divides by the partition estimate of each context instead",
    ),
    ("loss_type importance_sampling_level delta epsilon_high off_policy_mask_threshold use_bias_correction_kl", _LOSS),
    ("top_entropy_quantile use_adaptive_entropy router_aux_loss_coef", _LOSS),
    ("epsilon cliprange", "use ziegler_clip (PPO's clip range) or partition_epsilon (ε in cdpg's denominator)"),
    (
        "beta kl_coef init_kl_coef",
        "use ziegler_beta or rloo_beta (cdpg and dpg have no KL penalty: the base is a factor of their target)",
    ),
    ("vf_coef cliprange_value", "use ziegler_value_weight and ziegler_clip"),
    ("lam gamma gae_lambda", "use ziegler_gae_lambda (γ is 1)"),
    ("target_kl", "use ziegler_target_kl"),
    ("horizon", "use ziegler_horizon"),
    (
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps ref_model",
        "the base stays as it was loaded, because the ideal model is defined by it",
    ),
    # Memory, precision, machines.
    ("bf16 bf16_full_eval bfloat16 torch_dtype", "use dtype: bfloat16"),
    ("fp16 fp16_full_eval float16 half_precision_backend", "use dtype: bfloat16 (float16 is not offered)"),
    ("tf32", "it is a setting of torch: call torch.set_float32_matmul_precision('high') in your program"),
    ("cast_lm_head_to_fp32", "log-probabilities are always computed from float32 logits"),
    ("gradient_checkpointing_kwargs activation_offloading", _MEMORY),
    ("auto_find_batch_size torch_empty_cache_steps", _MEMORY),
    ("use_liger_kernel liger_kernel_config", "the model's own layers are run, its logits a piece at a time"),
    ("use_cpu no_cuda use_mps_device", "use device: cpu, cuda or mps"),
    ("accelerator_config parallelism_config local_rank num_processes tp_size mp_parameters", _LAUNCH),
    ("deepspeed ds3_gather_for_generation", _LAUNCH),
    (
        "load_in_4bit load_in_8bit quantization_config model_init_kwargs attn_implementation revision model_revision",
        "load the model yourself with from_pretrained, and pass it to CDPGTrainer in place of its name",
    ),
    (
        "use_peft peft peft_config",
        "use lora_rank; in Python, the trainer's argument peft_config takes more kinds",
    ),
    ("lora_r lora_dim rank", "use lora_rank"),
    ("lora_targets target_modules", "use lora_target_modules"),
    ("lora_dropout", "dropout is always off, in adapters too; lora_rank and lora_alpha set them"),
    (
        "lora_bias modules_to_save lora_modules_to_save use_rslora use_dora init_lora_weights",
        "in Python, pass a LoraConfig of PEFT to the trainer as peft_config",
    ),
    # Logging and evaluation.
    (
        "logging_strategy logging_steps logging_first_step log_every log_interval include_num_input_tokens_seen "
        "include_tokens_per_second",
        "every epoch is logged, to metrics.jsonl and to the trackers named by report_to",
    ),
    (
        "log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo log_multimodal",
        "use log_samples (samples of every epoch are written to samples.jsonl)",
    ),
    (
        "logging_dir run_name project",
        "use output_dir (it names the run; trackers have names of their own, as WANDB_NAME)",
    ),
    ("logging_nan_inf_filter", "a step that is not finite is skipped, counted in metrics.jsonl and kept in nonfinite/"),
    ("log_on_each_node save_on_each_node", "the first process alone writes"),
    (
        "log_level log_level_replica disable_tqdm debug verbose",
        "notices go through the logger 'cdpg', whose level hides them; progress goes to standard error, as a bar in a "
        "terminal, elsewhere in a few lines (contextlib.redirect_stderr hides it)",
    ),
    ("skip_memory_metrics", "the memory in use is always shown after the first epoch"),
    (
        "eval_strategy evaluation_strategy eval_steps eval_delay do_eval eval_every eval_interval",
        "use evaluate_every (in epochs)",
    ),
    ("eval_on_start", "use evaluate_every (the base is always evaluated first)"),
    ("do_train do_predict", "call trainer.train() or trainer.evaluate(), or use cdpg run or cdpg evaluate"),
    (
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics "
        "include_inputs_for_metrics label_names compute_metrics",
        "an evaluation samples and judges; the trainer's argument measure adds metrics of your own, in Python",
    ),
    # Saving.
    ("save_strategy save_steps", "use save_every (in epochs)"),
    ("save_total_limit", "use keep_checkpoints"),
    ("save_only_model", "the model alone is in model/; a checkpoint always holds what a resumed run needs"),
    ("save_safetensors", "weights are always saved as safetensors"),
    ("enable_jit_checkpoint", "SIGTERM and Ctrl-C always end the epoch and write a checkpoint"),
    (
        "load_best_model_at_end metric_for_best_model greater_is_better",
        "use keep: best (it chooses by the gain on validation contexts); keep_checkpoints says how many earlier "
        "checkpoints stay",
    ),
    ("push_to_hub", _HUB),
    ("resume_from_checkpoint resume", "use --resume, or in Python train(resume_from_checkpoint=True)"),
    ("restore_callback_states_from_checkpoint", "the state of a callback is not part of a checkpoint"),
    # Data.
    ("ignore_data_skip", "the order of the contexts follows from seed alone, so that a resumed run skips nothing"),
    ("full_determinism", "on a CPU a run with the same seed is always the same, bit for bit"),
    ("data_seed", "use seed (for the order of the contexts; eval_dataset names those that are held out)"),
    (
        "shuffle_dataset train_sampling_strategy group_by_length length_column_name sortish_sampler",
        "contexts are always drawn in an order shuffled by seed, and scored together with others of like length",
    ),
    ("remove_unused_columns", "every column of the contexts reaches the constraint"),
    ("dataset_text_field text_column", "use prompt_column; in Python, call the column of the data set prompt"),
    ("packing completion_only_loss assistant_only_loss dataset_num_proc dataset_kwargs", _LOADER),
    ("model_name_or_path model_name model_id base_model", "use model; in Python, the trainer's first argument"),
    ("dataset_name dataset train_dataset train_file", "use contexts; in Python, the trainer's argument train_dataset"),
    ("eval_dataset validation_file test_file", "use eval_contexts; in Python, the trainer's argument eval_dataset"),
    (
        "reward_funcs reward_func reward_function reward_model constraints",
        "use constraint (module:function); in Python, the trainer's argument constraints",
    ),
    ("processing_class tokenizer callbacks measure", "it is an argument of CDPGTrainer, in Python"),
    ("task preset model", _COMMAND + "pass the model to CDPGTrainer"),
    ("constraint", _COMMAND + "pass the function to CDPGTrainer"),
    (
        "contexts eval_contexts prompt_column prompt_prefix",
        _COMMAND + "pass data sets to CDPGTrainer",
    ),
)
"""Names, separated by blanks, and the answer to each of them."""

ARGUMENTS: tuple[tuple[str, str], ...] = (
    (
        "reward_funcs reward_func reward_functions reward_function reward_model rewards constraint",
        "use constraints (a function of prompts and completions with values in [0, 1], or several; a reward function "
        "of TRL with such values fits as it is)",
    ),
    ("tokenizer feature_extractor image_processor", "use processing_class"),
    ("config training_args arguments", "use args (a CDPGConfig, or a dictionary of settings)"),
    ("dataset data contexts", "use train_dataset"),
    ("eval_contexts validation_dataset", "use eval_dataset"),
    ("optimizers optimizer_cls_and_kwargs", _ADAM),
    ("reward_processing_classes", "a constraint gets texts, and encodes them itself if it uses a model"),
    ("data_collator", _LOADER),
    ("model_init", "pass the model itself, or its name"),
    ("compute_loss_func", _LOSS),
    (
        "preprocess_logits_for_metrics",
        "an evaluation samples and judges; the argument measure adds metrics of your own",
    ),
    ("value_model", "the value estimate of ziegler is a layer on the policy itself"),
    ("rollout_func environment_factory", "a completion is one answer, sampled by the model that is tuned"),
)
"""The same for the arguments of other trainers, where the answer is not the one above."""

FAMILIES = {
    "vllm_": "vLLM samples from the whole distribution, with the settings of engine, engine_url and engine_memory",
    "hub_": _HUB,
    "dataloader_": _LOADER,
    "ddp_": _LAUNCH,
    "fsdp": "set sharding to full, and start the program with accelerate launch or torchrun",
    "sapo_": _LOSS,
    "vespo_": _LOSS,
    "entropy_": _LOSS,
    "torch_compile": "models are run as they are loaded; rows_per_pass and tokens_per_pass set the speed",
    "trackio_": "use report_to (Accelerate's name of a tracker, which has settings of its own)",
}
"""Answers to all names with a prefix."""


def answer(name: str) -> str | None:
    """What to use instead of another library's name; None if the name is not known."""
    exact = next((text for names, text in ANSWERS if name in names.split()), None)
    return exact or next((text for start, text in FAMILIES.items() if name.startswith(start)), None)


def unknown_argument(name: str, known: Iterable[str], settings: Iterable[str]) -> str:
    """A sentence on a keyword that is not an argument of the trainer: what to use instead, or how to set a setting."""
    answered = next((text for names, text in ARGUMENTS if name in names.split()), None)
    if answered is None and name in settings:
        answered = f"it is a setting: pass args=CDPGConfig({name}=…)"
    near = nearest(name, known, NEARLY_EQUAL)
    suggested = f"did you mean {near!r}?" if near else f"the arguments are {', '.join(known)}"
    return f"unknown argument {name!r}: {answered or answer(name) or suggested}"


def unknown_setting(name: str, known: Iterable[str]) -> str:
    """A sentence on a name that is not a setting: what to use instead, or the setting that was probably meant."""
    near = nearest(name, known, NEARLY_EQUAL)
    hint = answer(name) or (f"did you mean {near!r}?" if near else "cdpg settings lists all settings")
    return f"unknown setting {name!r}: {hint}"
